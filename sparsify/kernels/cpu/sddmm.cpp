// Single entries of a product as dot products: see sddmm.py.
//
// Reading a column of a factor for each entry would miss the cache at every token. A few tokens of both factors are
// transposed at a time instead, so that an entry costs two short contiguous reads.

#include "columns.h"

namespace {

template <class T>
void sddmm(const Factor<T>& left, const Factor<T>& right, int64_t n, const int64_t* indices, int64_t k, float* out) {
  if (k <= FEW) {
#pragma omp parallel for schedule(static)
    for (int64_t e = 0; e < k; ++e) out[e] = strided_dot(left, right, n, indices[e]);
    return;
  }
  const auto places = places_of(indices, k, right.width);
  ThreadSums sums(k);
#pragma omp parallel
  {
    std::unique_ptr<float[]> columns(new float[(left.width + right.width) * TOKENS]());
    float *of_left = columns.get(), *of_right = of_left + left.width * TOKENS, *own = sums.own();
#pragma omp for schedule(static)
    for (int64_t first = 0; first < n; first += TOKENS) {
      const int64_t tokens = std::min(TOKENS, n - first);
      if (tokens < TOKENS) std::fill_n(of_left, (left.width + right.width) * TOKENS, 0.f);
      transpose(left, first, tokens, of_left);
      transpose(right, first, tokens, of_right);
      add_dots(places, of_left, of_right, own);
    }
#pragma omp for schedule(static)
    for (int64_t e = 0; e < k; ++e) out[e] = sums.total(e);
  }
}

}  // namespace

extern "C" {

void sddmm_float32(const float* left, const float* right, int64_t n, int64_t rows, int64_t cols, const int64_t* indices,
                   int64_t k, float* out) {
  sddmm(Factor<float>{left, rows}, Factor<float>{right, cols}, n, indices, k, out);
}

void sddmm_bfloat16(const bfloat16* left, const bfloat16* right, int64_t n, int64_t rows, int64_t cols,
                    const int64_t* indices, int64_t k, float* out) {
  sddmm(Factor<bfloat16>{left, rows}, Factor<bfloat16>{right, cols}, n, indices, k, out);
}
}
