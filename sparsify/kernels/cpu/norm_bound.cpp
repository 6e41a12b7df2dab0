// The entries of a product that could reach a threshold, from its factors, and some wanted entries: see norm_bound.py.
//
// measure:   reads the factors once, for the norms that bound the entries, the wanted entries' dot products, and the
//            sums of the left factor's columns;
// rank:      drops the rows and columns that cannot reach the threshold by their norms, and orders the others by their
//            bounds;
// pack:      packs what is left of both factors into tiles as the multiplier reads them: registers, or matrix units;
// multiply:  multiplies tile by tile, as far as the bounds allow; a finished tile is compared while it is in the cache,
//            and never written anywhere.

#include <cstdlib>

#include "bounds.h"
#include "registers.h"
#ifdef __AMX_BF16__
#include "matrix_units.h"
#endif

namespace {

constexpr int64_t PAIRS_AT_ONCE = 8;          // of the right factor: they, and their sums, stay in a core's own cache
constexpr int64_t PACKED_AT_ONCE = 64 << 20;  // bytes of the left factor
constexpr int64_t NOT_FINITE = -1, TOO_MANY = -2, NO_MEMORY = -3;

// Memory that is kept from call to call: getting it from the system anew would cost as much as packing.
class Workspace {
 public:
  ~Workspace() { std::free(memory_); }
  void* get(int64_t bytes) {  // null where there is no more
    if (bytes > size_) {
      std::free(memory_);
      memory_ = std::aligned_alloc(64, bytes);
      size_ = memory_ ? bytes : 0;
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};

// Returns how many entries were found.
template <class Multiplier, class T>
int64_t multiply_and_compare(const Factor<T>& left, const Factor<T>& right, int64_t n, const Bounds& bounds,
                             Found& found) {
  using Number = typename Multiplier::Number;
  static thread_local Workspace workspace;
  const int64_t blocks = std::max(int64_t(1), (n + TOKENS - 1) / TOKENS);
  const int64_t panel_pitch = blocks * TILE, pitch = 2 * panel_pitch;
  const int64_t row_pairs = bounds.rows.pairs(), col_pairs = bounds.cols.pairs();
  const int64_t at_once = std::clamp(PACKED_AT_ONCE / int64_t(pitch * sizeof(Number)), int64_t(1), row_pairs);
  const auto packed_right = static_cast<Number*>(workspace.get((at_once + col_pairs) * pitch * sizeof(Number)));
  if (!packed_right) return NO_MEMORY;
  Number* const packed_left = packed_right + col_pairs * pitch;
#pragma omp parallel
  {
    Multiplier multiplier(std::max(left.width, right.width));
    alignas(64) float products[PAIRS_AT_ONCE][PAIR * PAIR];
    for (int64_t start = 0; start < row_pairs; start += at_once) {
      const int64_t stop = std::min(start + at_once, row_pairs);
#pragma omp for schedule(static)
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * TOKENS, tokens = std::min(TOKENS, n - first), tile = block * TILE;
        multiplier.pack_left(left, first, tokens, &bounds.rows.places[start * PAIR], 2 * (stop - start),
                             packed_left + tile, panel_pitch);
        if (start == 0)
          multiplier.pack_right(right, first, tokens, bounds.cols.places.data(), 2 * col_pairs, packed_right + tile,
                                panel_pitch);
      }
#pragma omp for collapse(2) schedule(static, 1)  // few rows may be left, or few columns
      for (int64_t chunk = 0; chunk < col_pairs; chunk += PAIRS_AT_ONCE)
        for (int64_t i = start; i < stop; ++i) {
          const int64_t end = std::min(chunk + PAIRS_AT_ONCE, bounds.pairs_left[i]);
          for (int64_t b = 0; b < blocks; b += Multiplier::DEPTH)
            for (int64_t j = chunk; j < end; ++j)
              multiplier.multiply(packed_left + (i - start) * pitch + b * TILE, packed_right + j * pitch + b * TILE,
                                  panel_pitch, std::min(Multiplier::DEPTH, blocks - b), b == 0, products[j - chunk]);
          for (int64_t j = chunk; j < end; ++j)
            for (int64_t q = 0; q < 4; ++q)
              bounds.compare(products[j - chunk] + q * QUARTER, 2 * i + q / 2, 2 * j + q % 2, found);
        }
    }
  }
  return found.number;
}

template <class T>
int64_t screen([[maybe_unused]] bool matrix_units, const T* left_values, const T* right_values, int64_t n, int64_t rows,
               int64_t cols, const int64_t* wanted, int64_t k, float* taken, float* left_sums, const int64_t* excluded,
               int64_t num_excluded, const float* least, float rounding, Found found, int64_t most_multiplied,
               int64_t* multiplied) {
  const Factor<T> left{left_values, rows}, right{right_values, cols};
  const Norms norms = measure(left, right, n, wanted, k, taken, left_sums);
  const auto largest = [](const std::vector<float>& numbers) {
    return *std::max_element(numbers.begin(), numbers.end());
  };
  const auto is_finite = [](float x) { return std::isfinite(x); };
  if (!std::all_of(norms.rows.begin(), norms.rows.end(), is_finite) ||
      !std::all_of(norms.cols.begin(), norms.cols.end(), is_finite) ||
      !is_finite(2 * largest(norms.rows) * largest(norms.cols)))
    return NOT_FINITE;

  const float slack = 1 + (n + 8) * 0x1p-22f;  // for the rounding of the norms, and of an entry
  std::vector<float> row_bounds(rows);
  for (int64_t i = 0; i < rows; ++i) row_bounds[i] = norms.rows[i] * slack / least[i];
  Bounds bounds(rank(row_bounds, largest(norms.cols)), rank(norms.cols, largest(row_bounds)), norms, least, rounding);
  *multiplied = bounds.to_multiply();
  if (*multiplied == 0) return 0;
  if (*multiplied > most_multiplied) return TOO_MANY;
  bounds.excluded.resize(rows * cols);
  for (int64_t e = 0; e < num_excluded; ++e) bounds.excluded[excluded[e]] = true;
#ifdef __AMX_BF16__
  if (matrix_units) return multiply_and_compare<MatrixUnits>(left, right, n, bounds, found);
#endif
  return multiply_and_compare<Registers>(left, right, n, bounds, found);
}

}  // namespace

extern "C" {

bool has_matrix_units() {
#ifdef __AMX_BF16__
  return MatrixUnits::may_be_used();
#else
  return false;
#endif
}

int64_t screen_float32(bool matrix_units, const float* left, const float* right, int64_t n, int64_t rows, int64_t cols,
                       const int64_t* wanted, int64_t k, float* taken, float* left_sums, const int64_t* excluded,
                       int64_t num_excluded, const float* least, float rounding, int64_t* found, float* values,
                       float* most, int64_t most_found, int64_t most_multiplied, int64_t* multiplied) {
  return screen(matrix_units, left, right, n, rows, cols, wanted, k, taken, left_sums, excluded, num_excluded, least,
                rounding, Found{found, values, most, most_found}, most_multiplied, multiplied);
}

int64_t screen_bfloat16(bool matrix_units, const bfloat16* left, const bfloat16* right, int64_t n, int64_t rows,
                        int64_t cols, const int64_t* wanted, int64_t k, float* taken, float* left_sums,
                        const int64_t* excluded, int64_t num_excluded, const float* least, float rounding,
                        int64_t* found, float* values, float* most, int64_t most_found, int64_t most_multiplied,
                        int64_t* multiplied) {
  return screen(matrix_units, left, right, n, rows, cols, wanted, k, taken, left_sums, excluded, num_excluded, least,
                rounding, Found{found, values, most, most_found}, most_multiplied, multiplied);
}
}
