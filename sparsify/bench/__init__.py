"""Speed and memory side by side: each method in a process of its own, their rounds interleaved, ratios reported."""
