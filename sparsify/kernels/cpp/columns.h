// What the loops over a product left^T right share: its factors' columns, a few tokens at a time.
//
// The factors are (n, width), row-major. An entry of the product is the dot product of two columns, and reading a
// column misses the cache at every token. So a block of tokens is transposed first: then its columns are short
// contiguous runs.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

constexpr int64_t TOKENS = 32;  // in a block: its columns stay in a core's own cache

using bfloat16 = uint16_t;  // the 16 bits of one

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float widen(float x) { return x; }

inline float widen(bfloat16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline uint32_t nearest(float x) {  // bfloat16, ties to even
  const uint32_t bits = bits_of(x);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

inline uint32_t nearest(bfloat16 x) { return x; }

template <class T>
struct Factor {
  const T* values;
  int64_t width;
};

// Writes a block of tokens as (width, TOKENS); what tokens a last block lacks is left as it was.
template <class T>
void transpose(const Factor<T>& factor, int64_t first, int64_t tokens, float* out) {
  constexpr int64_t LINE = 16;
  const T* rows = factor.values + first * factor.width;
  int64_t c = 0;
  for (; c + LINE <= factor.width; c += LINE)
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; i < LINE; ++i) out[(c + i) * TOKENS + t] = widen(rows[t * factor.width + c + i]);
  for (; c < factor.width; ++c)
    for (int64_t t = 0; t < tokens; ++t) out[c * TOKENS + t] = widen(rows[t * factor.width + c]);
}

inline float dot(const float* a, const float* b) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t t = 0; t < TOKENS; ++t) total += a[t] * b[t];
  return total;
}

// Where the columns of an entry lie in the transposed blocks of left and right.
struct Place {
  int32_t left, right;
};

inline std::vector<Place> places_of(const int64_t* indices, int64_t k, int64_t cols) {
  std::vector<Place> places(k);
  for (int64_t e = 0; e < k; ++e)
    places[e] = {int32_t(indices[e] / cols * TOKENS), int32_t(indices[e] % cols * TOKENS)};
  return places;
}

inline void add_dots(const std::vector<Place>& places, const float* left, const float* right, float* sums) {
  for (size_t e = 0; e < places.size(); ++e) sums[e] += dot(left + places[e].left, right + places[e].right);
}

// Sums that every thread of a parallel region makes for itself.
class ThreadSums {
 public:
  explicit ThreadSums(int64_t number) : number_(number), sums_(omp_get_max_threads()) {}

  float* own() {
    auto& own = sums_[omp_get_thread_num()];
    if (!own) own.reset(new float[number_]());
    return own.get();
  }

  // Of all threads, in their order, so that the same numbers make the same sum every time.
  float total(int64_t i) const {
    float total = 0;
    for (const auto& own : sums_)
      if (own) total += own[i];
    return total;
  }

 private:
  int64_t number_;
  std::vector<std::unique_ptr<float[]>> sums_;
};
