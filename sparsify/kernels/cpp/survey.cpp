// A product's candidates from its factors in bfloat16, on the matrix units (AMX), and some of its entries: see
// survey.py.
//
// measure:   each thread takes blocks of tokens, for the wanted entries' dot products, the columns' norms, and the sums
//            of the left one's;
// rank:      an entry is at most the product of two norms, so rows and columns that cannot reach the threshold drop
//            out, and the others are ordered by how far they can reach;
// pack:      what is left of both factors, rounded, into tiles as the units read them;
// multiply:  tile by tile, as far as tiles can reach; one that is done is compared while it is in the cache, and never
//            written anywhere.

#include "columns.h"

#ifdef __AMX_BF16__

#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>

namespace {

constexpr int64_t PANEL = 16;                  // rows, or columns, of a tile of the product
constexpr int64_t PAIR = 2 * PANEL;            // two panels, which are multiplied together
constexpr int64_t TILE = PANEL * TOKENS;       // numbers in a tile of a factor
constexpr int64_t DEPTH = 8;                   // tiles that are multiplied before the next pair of panels has its turn
constexpr int64_t PAIRS_AT_ONCE = 8;           // of the right factor: they, and their sums, stay in a core's own cache
constexpr float SQUARES_UNDERFLOW = 0x1p-63f;  // of numbers below it: what a norm may lack for each

bool may_use_tiles() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool may = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return may;
}

// The units' shapes, for as long as it lives; whoever else had set them finds them as before.
class TileShapes {
 public:
  TileShapes() {
    for (int i = 0; i < 8; ++i) ours_.bytes[i] = 64, ours_.rows[i] = 16;
    ours_.palette = 1;
    _tile_storeconfig(&before_);
    _tile_loadconfig(&ours_);
  }
  ~TileShapes() {
    if (before_.palette)
      _tile_loadconfig(&before_);
    else
      _tile_release();
  }

 private:
  struct alignas(64) Shapes {
    uint8_t palette = 0, start = 0, reserved[14] = {0};
    uint16_t bytes[16] = {0};
    uint8_t rows[16] = {0};
  };
  Shapes before_, ours_;
};

// Memory that is kept from call to call: getting it from the system anew would cost as much as packing.
class Workspace {
 public:
  ~Workspace() { std::free(memory_); }
  bfloat16* get(int64_t numbers) {
    if (numbers > size_) {
      std::free(memory_);
      memory_ = std::aligned_alloc(64, numbers * sizeof(bfloat16));
      size_ = numbers;
    }
    return static_cast<bfloat16*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};

template <class T>
void read_ahead(const T* numbers, int64_t width) {
  for (int64_t c = 0; c < width; c += 64 / sizeof(T))
    _mm_prefetch(reinterpret_cast<const char*>(numbers + c), _MM_HINT_T1);
}

template <class T>
void add_squares(const Factor<T>& factor, int64_t first, int64_t tokens, float* squares) {
  for (int64_t t = first; t < first + tokens; ++t) {
    const T* row = factor.values + t * factor.width;
    read_ahead(row + factor.width, factor.width);
#pragma omp simd
    for (int64_t c = 0; c < factor.width; ++c) squares[c] += widen(row[c]) * widen(row[c]);
  }
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

struct Norms {
  float underflow;  // what each may lack
  std::vector<float> rows, cols;
};

template <class T>
Norms measure(const Factor<T>& left, const Factor<T>& right, int64_t n, const int64_t* wanted, int64_t k, float* taken,
              float* left_sums) {
  const int64_t rows = left.width, cols = right.width, many = k > FEW ? k : 0;
  const auto places = places_of(wanted, many, cols);
  const float underflow = std::sqrt(float(std::max(n, int64_t(1)))) * SQUARES_UNDERFLOW;
  Norms norms{underflow, std::vector<float>(rows), std::vector<float>(cols)};
  ThreadSums sums(many + rows + cols + rows);
#pragma omp parallel
  {
    std::unique_ptr<float[]> columns(new float[many ? (rows + cols) * TOKENS : rows]);
    float *of_left = columns.get(), *of_right = of_left + rows * TOKENS, *own = sums.own();
#pragma omp for schedule(static)
    for (int64_t first = 0; first < n; first += TOKENS) {
      const int64_t tokens = std::min(TOKENS, n - first);
      add_squares(left, first, tokens, own + many);  // reads ahead, row by row, for those that go across the rows
      add_squares(right, first, tokens, own + many + rows);
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
      norms.rows[i] = std::sqrt(sums.total(many + i)) + underflow;
      left_sums[i] = sums.total(many + rows + cols + i);
    }
#pragma omp for schedule(static) nowait
    for (int64_t j = 0; j < cols; ++j) norms.cols[j] = std::sqrt(sums.total(many + rows + j)) + underflow;
  }
  return norms;
}

// Rows, or columns, of the product that can reach what they have to: about in the order of how far.
struct Ranked {
  int64_t number = 0;
  std::vector<int32_t> places;    // in the factor; filled up to whole pairs of panels
  std::vector<float> pair_reach;  // of two panels, the largest

  int64_t pairs() const { return pair_reach.size(); }
  int64_t panels() const { return 2 * pairs(); }
};

Ranked rank(const std::vector<float>& reach, float other) {
  constexpr int SHIFT = 18;  // of a float's bits, which order as it does: one key for what differs by 3 %
  constexpr int64_t KEYS = int64_t(0x7f800000 >> SHIFT) + 1;
  std::vector<int32_t> ends(KEYS + 1);
  const auto key = [](float x) { return KEYS - 1 - (bits_of(x) >> SHIFT); };
  Ranked ranked;
  for (float x : reach)
    if (x * other >= 1) ++ends[key(x) + 1], ++ranked.number;
  for (int64_t i = 1; i <= KEYS; ++i) ends[i] += ends[i - 1];
  const int64_t pairs = (ranked.number + PAIR - 1) / PAIR;
  ranked.places.resize(pairs * PAIR);
  ranked.pair_reach.resize(pairs);
  for (size_t i = 0; i < reach.size(); ++i)
    if (reach[i] * other >= 1) {
      const int64_t at = ends[key(reach[i])]++;
      ranked.places[at] = i;
      ranked.pair_reach[at / PAIR] = std::max(ranked.pair_reach[at / PAIR], reach[i]);
    }
  return ranked;
}

// A panel of the left factor's columns, 32 tokens each, as a tile: each is a row of it, in bfloat16.
void pack_left(const float* columns, const int32_t* places, bfloat16* tile) {
  for (int64_t c = 0; c < PANEL; ++c) {
    const float* column = columns + places[c] * TOKENS;
    const __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(column + LINE), _mm512_loadu_ps(column));
    _mm512_storeu_si512(tile + c * TOKENS, reinterpret_cast<__m512i>(rounded));
  }
}

// One of the right factor's: 16 pairs of tokens by 16 columns, the two of a pair side by side.
void pack_right(const float* columns, const int32_t* places, bfloat16* tile) {
  alignas(64) float pairs[PANEL * PANEL];
  pack_left(columns, places, reinterpret_cast<bfloat16*>(pairs));
  transpose_square(pairs, PANEL, reinterpret_cast<float*>(tile), PANEL);
}

// Both factors' ranked columns as the units read them.
template <class T>
void pack(const Factor<T>& left, const Factor<T>& right, int64_t n, const Ranked& rows, const Ranked& cols,
          bfloat16* packed_left, bfloat16* packed_right) {
  const int64_t blocks = (n + TOKENS - 1) / TOKENS;
  std::unique_ptr<float[]> columns(new float[std::max(left.width, right.width) * TOKENS]());
  const auto pack_factor = [&](const auto& factor, const Ranked& ranked, auto pack_panel, int64_t block,
                               bfloat16* packed) {
    const int64_t first = block * TOKENS, tokens = std::min(TOKENS, n - first);
    if (tokens < TOKENS) std::fill_n(columns.get(), factor.width * TOKENS, 0.f);
    transpose(factor, first, tokens, columns.get());
    for (int64_t panel = 0; panel < ranked.panels(); ++panel)
      pack_panel(columns.get(), &ranked.places[panel * PANEL], packed + (panel * blocks + block) * TILE);
  };
#pragma omp for schedule(static)
  for (int64_t block = 0; block < blocks; ++block) {
    pack_factor(left, rows, pack_left, block, packed_left);
    pack_factor(right, cols, pack_right, block, packed_right);
  }
}

// Adds the products of two panels of left with two of right, over some blocks of tokens, to `sums`.
void multiply(const bfloat16* left, const bfloat16* right, int64_t blocks, int64_t first, int64_t last, float* sums) {
  const bfloat16 *l0 = left, *l1 = left + blocks * TILE, *r0 = right, *r1 = right + blocks * TILE;
  constexpr int64_t QUARTER = PANEL * PANEL;
  if (first == 0) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + QUARTER, 64);
    _tile_loadd(2, sums + 2 * QUARTER, 64);
    _tile_loadd(3, sums + 3 * QUARTER, 64);
  }
  for (int64_t b = first; b < last; ++b) {
    _tile_loadd(4, l0 + b * TILE, 64);
    _tile_loadd(6, r0 + b * TILE, 64);
    _tile_loadd(5, l1 + b * TILE, 64);
    _tile_loadd(7, r1 + b * TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + QUARTER, 64);
  _tile_stored(2, sums + 2 * QUARTER, 64);
  _tile_stored(3, sums + 3 * QUARTER, 64);
}

struct Found {
  int64_t* indices;
  float* most;
  int64_t room;
  int64_t number = 0;

  void add(int64_t index, float size) {
    int64_t at;
#pragma omp atomic capture
    at = number++;
    if (at < room) indices[at] = index, most[at] = size;
  }
};

// How far entries may be off, what they have to reach, and which are no candidates.
struct Bounds {
  Ranked rows, cols;
  int64_t width;                              // columns of the whole product
  std::vector<float> least, row_error, norm;  // as ranked; an entry is off by row_error[i] * norm[j] at most
  std::vector<float> panel_least, panel_error, panel_norm;
  std::vector<bool> excluded;  // (rows * cols,)

  Bounds(Ranked of_rows, Ranked of_cols, const Norms& norms, const float* whole_least, float rounding)
      : rows(std::move(of_rows)), cols(std::move(of_cols)), width(norms.cols.size()) {
    for (int32_t place : rows.places) {
      least.push_back(whole_least[place]);
      row_error.push_back(norms.rows[place] * rounding + norms.underflow);
    }
    for (int32_t place : cols.places) norm.push_back(norms.cols[place]);
    const auto begin = [](auto& numbers, size_t panel) { return numbers.begin() + panel * PANEL; };
    for (size_t p = 0; p < rows.places.size() / PANEL; ++p) {
      panel_least.push_back(*std::min_element(begin(least, p), begin(least, p + 1)));
      panel_error.push_back(*std::max_element(begin(row_error, p), begin(row_error, p + 1)));
    }
    for (size_t p = 0; p < cols.places.size() / PANEL; ++p)
      panel_norm.push_back(*std::max_element(begin(norm, p), begin(norm, p + 1)));
  }

  // Of a pair of panels of rows: how many pairs of panels of columns can reach with it.
  int64_t pairs_that_reach(int64_t row_pair) const {
    int64_t pairs = cols.pairs();
    while (pairs && rows.pair_reach[row_pair] * cols.pair_reach[pairs - 1] < 1) --pairs;
    return pairs;
  }
};

void compare(const float* tile, int64_t row_panel, int64_t col_panel, const Bounds& bounds, Found& found) {
  float largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t e = 0; e < PANEL * PANEL; ++e) largest = std::max(largest, std::abs(tile[e]));
  if (largest + bounds.panel_error[row_panel] * bounds.panel_norm[col_panel] < bounds.panel_least[row_panel]) return;
  const int64_t first = col_panel * PANEL, last = std::min(bounds.cols.number, first + PANEL);
  for (int64_t i = row_panel * PANEL; i < std::min(bounds.rows.number, (row_panel + 1) * PANEL); ++i, tile += PANEL)
    for (int64_t j = first; j < last; ++j) {
      const float most = std::abs(tile[j - first]) + bounds.row_error[i] * bounds.norm[j];
      const int64_t index = bounds.rows.places[i] * bounds.width + bounds.cols.places[j];
      if (most >= bounds.least[i] && !bounds.excluded[index]) found.add(index, most);
    }
}

template <class T>
int64_t multiply_and_compare(const Factor<T>& left, const Factor<T>& right, int64_t n, const Bounds& bounds,
                             Found& found) {
  static thread_local Workspace workspace;
  const int64_t blocks = (n + TOKENS - 1) / TOKENS, pitch = 2 * blocks * TILE;  // of a pair of panels
  const int64_t row_pairs = bounds.rows.pairs(), col_pairs = bounds.cols.pairs();
  bfloat16* packed_left = workspace.get((row_pairs + col_pairs) * pitch);
  bfloat16* packed_right = packed_left + row_pairs * pitch;
  int64_t multiplied = 0;
#pragma omp parallel reduction(+ : multiplied)
  {
    pack(left, right, n, bounds.rows, bounds.cols, packed_left, packed_right);
    const TileShapes shapes;
    alignas(64) float products[PAIRS_AT_ONCE][PAIR * PAIR] = {};
    for (int64_t chunk = 0; chunk < col_pairs; chunk += PAIRS_AT_ONCE) {
#pragma omp for schedule(static, 1) nowait
      for (int64_t i = 0; i < row_pairs; ++i) {
        const int64_t end = std::min(chunk + PAIRS_AT_ONCE, bounds.pairs_that_reach(i));
        for (int64_t b = 0; b < blocks; b += DEPTH)
          for (int64_t j = chunk; j < end; ++j)
            multiply(packed_left + i * pitch, packed_right + j * pitch, blocks, b, std::min(b + DEPTH, blocks),
                     products[j - chunk]);
        for (int64_t j = chunk; j < end; ++j)
          for (int64_t q = 0; q < 4; ++q)
            compare(products[j - chunk] + q * PANEL * PANEL, 2 * i + q / 2, 2 * j + q % 2, bounds, found);
        multiplied += std::max(int64_t(0), end - chunk) * PAIR * PAIR;
      }
    }
  }
  return multiplied;
}

template <class T>
int64_t survey(const Factor<T>& left, const Factor<T>& right, int64_t n, const int64_t* wanted, int64_t k, float* taken,
               float* left_sums, const int64_t* excluded, int64_t num_excluded, const float* least, float rounding,
               Found found, int64_t* multiplied) {
  const Norms norms = measure(left, right, n, wanted, k, taken, left_sums);
  const auto largest = [](const std::vector<float>& numbers) {
    return *std::max_element(numbers.begin(), numbers.end());
  };
  const auto is_finite = [](float x) { return std::isfinite(x); };
  if (!std::all_of(norms.rows.begin(), norms.rows.end(), is_finite) ||
      !std::all_of(norms.cols.begin(), norms.cols.end(), is_finite) || !is_finite(2 * largest(norms.rows)) ||
      !is_finite(2 * largest(norms.rows) * largest(norms.cols)))
    return -1;

  const float slack = 1 + (n + 8) * 0x1p-22f;  // for the rounding of the norms, and of an entry
  std::vector<float> reach(left.width);
  for (int64_t i = 0; i < left.width; ++i) reach[i] = norms.rows[i] * slack / least[i];
  Bounds bounds(rank(reach, largest(norms.cols)), rank(norms.cols, largest(reach)), norms, least, rounding);
  if (!bounds.rows.number || !bounds.cols.number) return 0;
  bounds.excluded.resize(left.width * right.width);
  for (int64_t e = 0; e < num_excluded; ++e) bounds.excluded[excluded[e]] = true;
  *multiplied = multiply_and_compare(left, right, n, bounds, found);
  return found.number;
}

}  // namespace

extern "C" {

bool can_survey() { return may_use_tiles(); }

int64_t survey_float32(const float* left, const float* right, int64_t n, int64_t rows, int64_t cols,
                       const int64_t* wanted, int64_t k, float* taken, float* left_sums, const int64_t* excluded,
                       int64_t num_excluded, const float* least, float rounding, int64_t* found, float* most,
                       int64_t room, int64_t* multiplied) {
  return survey(Factor<float>{left, rows}, Factor<float>{right, cols}, n, wanted, k, taken, left_sums, excluded,
                num_excluded, least, rounding, Found{found, most, room}, multiplied);
}

int64_t survey_bfloat16(const bfloat16* left, const bfloat16* right, int64_t n, int64_t rows, int64_t cols,
                        const int64_t* wanted, int64_t k, float* taken, float* left_sums, const int64_t* excluded,
                        int64_t num_excluded, const float* least, float rounding, int64_t* found, float* most,
                        int64_t room, int64_t* multiplied) {
  return survey(Factor<bfloat16>{left, rows}, Factor<bfloat16>{right, cols}, n, wanted, k, taken, left_sums, excluded,
                num_excluded, least, rounding, Found{found, most, room}, multiplied);
}
}

#else

extern "C" bool can_survey() { return false; }

#endif
