"""The hot loops, each in its plain torch form, which is its specification, and in a faster one where there is one."""
