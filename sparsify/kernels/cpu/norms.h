// The norms that bound a product's entries, and what else one pass over its factors gives. Each thread takes blocks of
// tokens.
//
// Any scales s_t > 0 of the tokens bound an entry (Cauchy-Schwarz):
//
//     sum_t |l_t r_t| = sum_t |l_t s_t| |r_t / s_t| <= |l s| |r / s|
//
// The sum of all entries' squared bounds is least for s_t^2 = |r_t| / |l_t|, the norms of the token's rows. A
// classifier has a few tokens with large gradients, and plain norms bound an entry as if all tokens had.

#pragma once

#include <cmath>

#include "columns.h"

namespace {

constexpr int64_t TOGETHER = 4;                // tokens whose squares are added at once
constexpr float SQUARES_UNDERFLOW = 0x1p-63f;  // of numbers below it: what a norm may lack for each; norm_bound.py
constexpr float LARGEST_SCALE = 0x1p40f;       // norm_bound.py has the reason

inline float underflow_of(int64_t numbers) {
  return std::sqrt(float(std::max(numbers, int64_t(1)))) * SQUARES_UNDERFLOW;
}

template <class T>
float norm_of(const T* row, int64_t width) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t c = 0; c < width; ++c) squares += widen(row[c]) * widen(row[c]);
  return std::sqrt(squares) + underflow_of(width);
}

// What a token's left numbers are multiplied by, and its right ones divided; not a number where those are too large.
inline float scale_of(float left_norm, float right_norm) {
  if (!std::isfinite(left_norm) || !std::isfinite(right_norm)) return NAN;
  return std::clamp(std::sqrt(right_norm / left_norm), 1 / LARGEST_SCALE, LARGEST_SCALE);
}

// Adds the squares of some tokens' scaled numbers, column by column.
template <int64_t NUMBER, class T>
void add_squares(const T* rows, int64_t width, const float* scales, float* squares) {
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) {
    float sum = 0;
    for (int64_t t = 0; t < NUMBER; ++t) {
      const float scaled = widen(rows[t * width + c]) * scales[t];
      sum += scaled * scaled;
    }
    squares[c] += sum;
  }
}

template <class T>
void add_squares(const Factor<T>& factor, int64_t first, int64_t tokens, const float* scales, float* squares) {
  int64_t t = 0;
  for (; t + TOGETHER <= tokens; t += TOGETHER)
    add_squares<TOGETHER>(factor.values + (first + t) * factor.width, factor.width, scales + t, squares);
  for (; t < tokens; ++t) add_squares<1>(factor.values + (first + t) * factor.width, factor.width, scales + t, squares);
}

// Sums over a block of tokens, by themselves first: a sum over all of them one by one would round more.
template <class T>
void add_sums(const Factor<T>& factor, int64_t first, int64_t tokens, float* block, float* sums) {
  std::fill_n(block, factor.width, 0.f);
  for (int64_t t = first; t < first + tokens; ++t) {
    const T* row = factor.values + t * factor.width;
#pragma omp simd
    for (int64_t c = 0; c < factor.width; ++c) block[c] += widen(row[c]);
  }
#pragma omp simd
  for (int64_t c = 0; c < factor.width; ++c) sums[c] += block[c];
}

// An entry (i, j) is at most rows[i] * cols[j], and so is the sum of its terms' sizes.
struct Norms {
  float underflow;  // what each may lack
  std::vector<float> rows, cols;
};

// The norms, the wanted entries, and the left factor's sums.
template <class T>
Norms measure(const Factor<T>& left, const Factor<T>& right, int64_t n, const int64_t* wanted, int64_t k, float* taken,
              float* left_sums) {
  const int64_t rows = left.width, cols = right.width, many = k > FEW ? k : 0;
  const auto places = places_of(wanted, many, cols);
  Norms norms{underflow_of(n), std::vector<float>(rows), std::vector<float>(cols)};
  ThreadSums sums(many + rows + cols + rows);
#pragma omp parallel
  {
    std::unique_ptr<float[]> columns(new float[many ? (rows + cols) * TOKENS : rows]);
    float *of_left = columns.get(), *of_right = of_left + rows * TOKENS, *own = sums.own();
#pragma omp for schedule(static)
    for (int64_t first = 0; first < n; first += TOKENS) {
      const int64_t tokens = std::min(TOKENS, n - first);
      float scales[TOKENS], inverse[TOKENS];
      for (int64_t t = 0; t < tokens; ++t) {
        scales[t] =
            scale_of(norm_of(left.values + (first + t) * rows, rows), norm_of(right.values + (first + t) * cols, cols));
        inverse[t] = 1 / scales[t];
      }
      add_squares(left, first, tokens, scales, own + many);
      add_squares(right, first, tokens, inverse, own + many + rows);
      add_sums(left, first, tokens, columns.get(), own + many + rows + cols);
      if (!many) continue;
      if (tokens < TOKENS) std::fill_n(of_left, (rows + cols) * TOKENS, 0.f);
      transpose(left, first, tokens, of_left);
      transpose(right, first, tokens, of_right);
      add_dots(places, of_left, of_right, own);
    }
#pragma omp for schedule(static) nowait
    for (int64_t e = 0; e < k; ++e) taken[e] = many ? sums.total(e) : strided_dot(left, right, n, wanted[e]);
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < rows; ++i) {
      norms.rows[i] = std::sqrt(sums.total(many + i)) + norms.underflow;
      left_sums[i] = sums.total(many + rows + cols + i);
    }
#pragma omp for schedule(static) nowait
    for (int64_t j = 0; j < cols; ++j) norms.cols[j] = std::sqrt(sums.total(many + rows + j)) + norms.underflow;
  }
  return norms;
}

}  // namespace
