// A product's candidates from its factors, and some of its entries: see survey.py.
//
// measure:   one reading of the factors, for the norms that bound the entries, the wanted entries' dot products, and
//            the sums of the left one's columns;
// rank:      rows and columns that cannot reach the threshold by their norms drop out, and the others are ordered by
//            how far they can reach;
// pack:      what is left of both factors, into tiles as the multiplier reads them: the registers, or matrix units;
// multiply:  tile by tile, as far as tiles can reach; one that is done is compared while it is in the cache.
//
// The last two take some blocks of tokens at a time, and after each only those tiles that still can reach.

#include <cstdlib>

#include "registers.h"
#include "survivors.h"
#ifdef __AMX_BF16__
#include "matrix_units.h"
#endif

namespace {

constexpr int64_t PAIRS_AT_ONCE = 8;     // of the right factor: they stay in a core's own cache
constexpr int64_t TILES_AT_ONCE = 4096;  // of sums: 16 MB
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

// What is multiplied: the factors, and in which order their blocks of tokens come.
template <class T>
struct Work {
  const Factor<T>&left, &right;
  int64_t n;
  std::vector<int32_t> order;
};

// Finds what can reach in the pairs of panels of rows from `start` to `stop`; returns whether there was memory for it.
template <class Multiplier, class T>
bool multiply_and_compare(const Work<T>& work, const Bounds& bounds, const Rest& rest_of_rows, const Rest& rest_of_cols,
                          int64_t start, int64_t stop, Found& found) {
  using Number = typename Multiplier::Number;
  constexpr int64_t DEPTH = Multiplier::DEPTH, PITCH = DEPTH * TILE;  // of a panel
  static thread_local Workspace workspace;
  Survivors tiles(bounds, start, stop);
  const int64_t blocks = work.order.size(), num_sums = tiles.number() * PAIR * PAIR;
  const int64_t num_packed = (tiles.rows.pairs.size() + tiles.cols.pairs.size()) * 2 * PITCH;
  void* const memory = workspace.get(num_sums * sizeof(float) + num_packed * sizeof(Number));
  if (!memory) return false;
  float* const sums = static_cast<float*>(memory);
  Number* const packed = reinterpret_cast<Number*>(sums + num_sums);
#pragma omp parallel
  {
    Multiplier multiplier(std::max(work.left.width, work.right.width));
    for (int64_t group = 0, first = 0; first < blocks && !tiles.rows.pairs.empty(); ++group, first += DEPTH) {
      const int64_t depth = std::min(DEPTH, blocks - first);
      const int64_t row_pairs = tiles.rows.pairs.size(), col_pairs = tiles.cols.pairs.size();
      Number* const packed_right = packed + row_pairs * 2 * PITCH;
      const auto pack = [&](int64_t b, bool is_left) {
        const int64_t token = work.order[first + b] * TOKENS, tokens = std::min(TOKENS, work.n - token);
        if (is_left)
          multiplier.pack_left(work.left, token, tokens, tiles.rows.places.data(), 2 * row_pairs, packed + b * TILE,
                               PITCH);
        else
          multiplier.pack_right(work.right, token, tokens, tiles.cols.places.data(), 2 * col_pairs,
                                packed_right + b * TILE, PITCH);
      };
#pragma omp for schedule(dynamic) nowait
      for (int64_t b = 0; b < depth; ++b) pack(b, true);
#pragma omp for schedule(dynamic)
      for (int64_t b = 0; b < depth; ++b) pack(b, false);
#pragma omp for collapse(2) schedule(dynamic)  // few rows may reach, or few columns
      for (int64_t chunk = 0; chunk < col_pairs; chunk += PAIRS_AT_ONCE)
        for (int64_t r = 0; r < row_pairs; ++r) {
          const int64_t i = tiles.rows.pairs[r];
          for (int64_t c = chunk; c < std::min(chunk + PAIRS_AT_ONCE, col_pairs); ++c) {
            const int64_t j = tiles.cols.pairs[c];
            if (!tiles.has(i, j)) continue;
            float* const of_tile = sums + tiles.at(i, j) * PAIR * PAIR;
            multiplier.multiply(packed + r * 2 * PITCH, packed_right + c * 2 * PITCH, PITCH, depth, group == 0,
                                of_tile);
            if (first + depth < blocks) {
              if (!bounds.can_reach(of_tile, i, j, rest_of_rows.after(group, i) * rest_of_cols.after(group, j)))
                tiles.drop(i, j);
            } else {
              for (int64_t q = 0; q < 4; ++q)
                bounds.compare(of_tile + q * QUARTER, 2 * i + q / 2, 2 * j + q % 2, found);
            }
          }
        }
#pragma omp single
      tiles.narrow();
    }
  }
  return true;
}

// Returns how many entries were found.
template <class Multiplier, class T>
int64_t multiply_and_compare(const Factor<T>& left, const Factor<T>& right, int64_t n, const Norms& norms,
                             const Bounds& bounds, float slack, Found& found) {
  const Work<T> work{left, right, n, by_weight(norms)};
  const Rest rows(bounds.rows, norms, norms.squares.data(), work.order, Multiplier::DEPTH, slack);
  const Rest cols(bounds.cols, norms, norms.squares.data() + left.width, work.order, Multiplier::DEPTH, slack);
  for (int64_t start = 0, stop; start < bounds.rows.pairs(); start = stop) {
    stop = start + 1;
    while (stop < bounds.rows.pairs() && bounds.tiles_before[stop + 1] - bounds.tiles_before[start] <= TILES_AT_ONCE)
      ++stop;
    if (!multiply_and_compare<Multiplier>(work, bounds, rows, cols, start, stop, found)) return NO_MEMORY;
  }
  return found.number;
}

template <class T>
int64_t survey([[maybe_unused]] bool matrix_units, const T* left_values, const T* right_values, int64_t n, int64_t rows,
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
  std::vector<float> reach(rows);
  for (int64_t i = 0; i < rows; ++i) reach[i] = norms.rows[i] * slack / least[i];
  Bounds bounds(rank(reach, largest(norms.cols)), rank(norms.cols, largest(reach)), norms, least, rounding);
  *multiplied = bounds.to_multiply();
  if (*multiplied == 0) return 0;
  if (*multiplied > most_multiplied) return TOO_MANY;
  bounds.excluded.resize(rows * cols);
  for (int64_t e = 0; e < num_excluded; ++e) bounds.excluded[excluded[e]] = true;
#ifdef __AMX_BF16__
  if (matrix_units) return multiply_and_compare<MatrixUnits>(left, right, n, norms, bounds, slack, found);
#endif
  return multiply_and_compare<Registers>(left, right, n, norms, bounds, slack, found);
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

int64_t survey_float32(bool matrix_units, const float* left, const float* right, int64_t n, int64_t rows, int64_t cols,
                       const int64_t* wanted, int64_t k, float* taken, float* left_sums, const int64_t* excluded,
                       int64_t num_excluded, const float* least, float rounding, int64_t* found, float* values,
                       float* most, int64_t room, int64_t most_multiplied, int64_t* multiplied) {
  return survey(matrix_units, left, right, n, rows, cols, wanted, k, taken, left_sums, excluded, num_excluded, least,
                rounding, Found{found, values, most, room}, most_multiplied, multiplied);
}

int64_t survey_bfloat16(bool matrix_units, const bfloat16* left, const bfloat16* right, int64_t n, int64_t rows,
                        int64_t cols, const int64_t* wanted, int64_t k, float* taken, float* left_sums,
                        const int64_t* excluded, int64_t num_excluded, const float* least, float rounding,
                        int64_t* found, float* values, float* most, int64_t room, int64_t most_multiplied,
                        int64_t* multiplied) {
  return survey(matrix_units, left, right, n, rows, cols, wanted, k, taken, left_sums, excluded, num_excluded, least,
                rounding, Found{found, values, most, room}, most_multiplied, multiplied);
}
}
