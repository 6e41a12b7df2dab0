// The entries of a matrix that reach a threshold: see threshold.py.

#include "columns.h"

namespace {

constexpr int64_t BLOCK = 64;  // entries that are compared as one

inline float size_of(float x) { return x < 0 ? -x : x; }
inline float size_of(bfloat16 x) { return widen(bfloat16(x & 0x7fff)); }

template <class T>
int64_t find_reaching(const T* values, int64_t rows, int64_t cols, const float* least, int64_t* out, bool* finite) {
  int64_t found = 0;
  uint32_t highest = 0;  // as numbers, the bits of what is not finite are above all others
#pragma omp parallel for schedule(static) reduction(max : highest)
  for (int64_t i = 0; i < rows; ++i) {
    const T* row = values + i * cols;
    for (int64_t first = 0; first < cols; first += BLOCK) {
      const int64_t number = std::min(BLOCK, cols - first);
      float size[BLOCK];
      float largest = -1;
#pragma omp simd
      for (int64_t j = 0; j < number; ++j) size[j] = size_of(row[first + j]);
#pragma omp simd reduction(max : largest, highest)
      for (int64_t j = 0; j < number; ++j) {
        largest = size[j] > largest ? size[j] : largest;  // a NaN is not
        highest = std::max(highest, bits_of(size[j]) & 0x7fffffff);
      }
      if (!(largest >= least[i])) continue;
      int64_t here[BLOCK], count = 0;
      for (int64_t j = 0; j < number; ++j) {
        here[count] = i * cols + first + j;
        count += size[j] >= least[i];
      }
      int64_t at;
#pragma omp atomic capture
      {
        at = found;
        found += count;
      }
      for (int64_t h = 0; h < count; ++h) out[at + h] = here[h];
    }
  }
  *finite = highest < 0x7f800000;
  return found;
}

}  // namespace

extern "C" {

int64_t find_reaching_float32(const float* values, int64_t rows, int64_t cols, const float* least,
                              int64_t* out, bool* finite) {
  return find_reaching(values, rows, cols, least, out, finite);
}

int64_t find_reaching_bfloat16(const bfloat16* values, int64_t rows, int64_t cols, const float* least,
                               int64_t* out, bool* finite) {
  return find_reaching(values, rows, cols, least, out, finite);
}
}
