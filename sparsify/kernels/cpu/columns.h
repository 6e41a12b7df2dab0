// Columns of a product's factors, transposed a few tokens at a time, for the loops over left^T right.
//
// The factors are (n, width), row-major. An entry of the product is the dot product of two columns, and reading a
// column misses the cache at every token. So a block of tokens is transposed first: then its columns are short
// contiguous runs.

#pragma once

#include <omp.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "transpose.h"

constexpr int64_t TOKENS = 32;  // in a block: its columns stay in a core's own cache
constexpr int64_t FEW = 16;     // entries that are read where they lie: transposing for them would cost more

template <class T>
struct Factor {
  const T* values;
  int64_t width;
};

// Writes a block of tokens as (width, TOKENS); a last block may lack tokens, whose places are left as they were.
template <class T>
void transpose(const Factor<T>& factor, int64_t first, int64_t tokens, float* out) {
  const T* rows = factor.values + first * factor.width;
  int64_t c = 0;
  if (tokens == TOKENS)
    for (; c + SQUARE <= factor.width; c += SQUARE)
      for (int64_t t = 0; t < TOKENS; t += SQUARE)
        transpose_square(rows + t * factor.width + c, factor.width, out + c * TOKENS + t, TOKENS);
  for (; c < factor.width; ++c)
    for (int64_t t = 0; t < tokens; ++t) out[c * TOKENS + t] = widen(rows[t * factor.width + c]);
}

inline float dot(const float* a, const float* b) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t t = 0; t < TOKENS; ++t) total += a[t] * b[t];
  return total;
}

// An entry, read where its columns lie.
template <class T>
float strided_dot(const Factor<T>& left, const Factor<T>& right, int64_t n, int64_t index) {
  const T* l = left.values + index / right.width;
  const T* r = right.values + index % right.width;
  float parts[4] = {0};
  int64_t t = 0;
  for (; t + 4 <= n; t += 4)
    for (int64_t i = 0; i < 4; ++i) parts[i] += widen(l[(t + i) * left.width]) * widen(r[(t + i) * right.width]);
  for (; t < n; ++t) parts[0] += widen(l[t * left.width]) * widen(r[t * right.width]);
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
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

// Sums that each thread of a parallel region accumulates by itself.
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
