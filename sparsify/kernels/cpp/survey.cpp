// A product's candidates from its factors in bfloat16, on the matrix units (AMX), and some of its entries: see survey.py.
//
// pack:      each thread takes blocks of tokens, for the wanted entries' dot products, the columns' norms, and both
//            factors rounded into tiles as the units read them;
// multiply:  tile by tile; a tile that is done is compared while it is in the cache, and never written anywhere.

#include "columns.h"

#ifdef __AMX_BF16__

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>

namespace {

constexpr int64_t PANEL = 16;             // rows, or columns, of a tile of the product
constexpr int64_t TILE = PANEL * TOKENS;  // numbers in a tile of a factor
constexpr int64_t DEPTH = 8;              // tiles that are multiplied before the next pair of panels has its turn
constexpr int64_t PANELS_AT_ONCE = 16;    // of the right factor: they, and their sums, stay in a core's own cache
constexpr int64_t PANEL_PAIR = 4 * PANEL * PANEL;  // entries of the product of two panels with two
constexpr float SQUARES_UNDERFLOW = 0x1p-63f;      // of numbers below it: what a norm may lack for each

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
void add_squares(const Factor<T>& factor, int64_t first, int64_t tokens, float* squares) {
  for (int64_t t = first; t < first + tokens; ++t) {
    const T* row = factor.values + t * factor.width;
    for (int64_t c = 0; c < factor.width; c += 64 / sizeof(T))
      _mm_prefetch(reinterpret_cast<const char*>(row + factor.width + c), _MM_HINT_T1);
#pragma omp simd
    for (int64_t c = 0; c < factor.width; ++c) squares[c] += widen(row[c]) * widen(row[c]);
  }
}

// Tiles of the left factor: 16 columns of it by 32 tokens.
void pack_left(const float* columns, int64_t panels, int64_t block, int64_t blocks, bfloat16* packed) {
  for (int64_t c = 0; c < panels * PANEL; ++c) {
    const float* column = columns + c * TOKENS;
    bfloat16* out = packed + (c / PANEL * blocks + block) * TILE + c % PANEL * TOKENS;
#pragma omp simd
    for (int64_t t = 0; t < TOKENS; ++t) out[t] = bfloat16(nearest(column[t]));
  }
}

// Tiles of the right one: 16 pairs of tokens by 16 columns, the two of a pair side by side.
template <class T>
void pack_right(const Factor<T>& factor, const float* columns, int64_t panels, int64_t block, int64_t blocks,
                int64_t tokens, bfloat16* packed) {
  for (int64_t panel = 0; panel < panels; ++panel) {
    const bool whole = tokens == TOKENS && (panel + 1) * PANEL <= factor.width;
    for (int64_t pair = 0; pair < TOKENS / 2; ++pair) {
      uint32_t pairs[PANEL];
      if (whole) {
        const T* first = factor.values + (block * TOKENS + 2 * pair) * factor.width + panel * PANEL;
        const T* second = first + factor.width;
#pragma omp simd
        for (int64_t j = 0; j < PANEL; ++j) pairs[j] = nearest(first[j]) | nearest(second[j]) << 16;
      } else {
        const float* first = columns + panel * PANEL * TOKENS + 2 * pair;
        for (int64_t j = 0; j < PANEL; ++j)
          pairs[j] = nearest(first[j * TOKENS]) | nearest(first[j * TOKENS + 1]) << 16;
      }
      std::memcpy(packed + (panel * blocks + block) * TILE + pair * PANEL * 2, pairs, sizeof pairs);
    }
  }
}

// Adds the products of two panels of left with two of right, over some blocks of tokens, to `sums`.
void multiply(const bfloat16* left, const bfloat16* right, int64_t blocks, int64_t first, int64_t last, float* sums) {
  const bfloat16 *l0 = left, *l1 = left + blocks * TILE, *r0 = right, *r1 = right + blocks * TILE;
  constexpr int64_t QUARTER = PANEL_PAIR / 4;
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

// Part of what the next multiplications need of two panels: `turn` of `turns` calls, two at a time, fetch it all.
void read_ahead(const bfloat16* panel, int64_t blocks, int64_t turn, int64_t turns) {
  constexpr int64_t LINE = 64 / sizeof(bfloat16), LINES = DEPTH * TILE / LINE;
  const int64_t share = (2 * LINES + turns - 1) / turns, first = turn / 2 * share;
  for (int64_t line = first; line < std::min(first + share, LINES); ++line) {
    _mm_prefetch(reinterpret_cast<const char*>(panel + line * LINE), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(panel + blocks * TILE + line * LINE), _MM_HINT_T1);
  }
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
  int64_t rows, cols;
  const float* least;                  // (rows,)
  std::vector<float> row_error, norm;  // an entry is off by row_error[i] * norm[j] at most
  std::vector<float> panel_least, panel_error, panel_norm;
  std::vector<bool> excluded;  // (rows * cols,)

  bool finite() const {
    const auto is_finite = [](float x) { return std::isfinite(x); };
    return std::all_of(row_error.begin(), row_error.end(), is_finite) &&
           std::all_of(norm.begin(), norm.end(), is_finite) &&
           is_finite(*std::max_element(row_error.begin(), row_error.end()) *
                     *std::max_element(norm.begin(), norm.end()));
  }

  void of_panels(int64_t row_panels, int64_t col_panels) {
    for (int64_t p = 0; p < row_panels; ++p) {
      const int64_t first = std::min(rows, p * PANEL), last = std::min(rows, first + PANEL);
      panel_least[p] = first < last ? *std::min_element(least + first, least + last) : HUGE_VALF;
      panel_error[p] = *std::max_element(&row_error[p * PANEL], &row_error[p * PANEL] + PANEL);
    }
    for (int64_t p = 0; p < col_panels; ++p)
      panel_norm[p] = *std::max_element(&norm[p * PANEL], &norm[p * PANEL] + PANEL);
  }
};

void compare(const float* tile, int64_t row_panel, int64_t col_panel, const Bounds& bounds, Found& found) {
  float largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t e = 0; e < PANEL * PANEL; ++e) largest = std::max(largest, std::abs(tile[e]));
  if (largest + bounds.panel_error[row_panel] * bounds.panel_norm[col_panel] < bounds.panel_least[row_panel]) return;
  const int64_t first = col_panel * PANEL, last = std::min(bounds.cols, first + PANEL);
  for (int64_t row = row_panel * PANEL; row < std::min(bounds.rows, (row_panel + 1) * PANEL); ++row, tile += PANEL)
    for (int64_t col = first; col < last; ++col) {
      const float most = std::abs(tile[col - first]) + bounds.row_error[row] * bounds.norm[col];
      if (most >= bounds.least[row] && !bounds.excluded[row * bounds.cols + col])
        found.add(row * bounds.cols + col, most);
    }
}

template <class T>
int64_t survey(const Factor<T>& left, const Factor<T>& right, int64_t n, const int64_t* wanted, int64_t k, float* taken,
               const int64_t* excluded, int64_t num_excluded, const float* least, float rounding, Found found) {
  static thread_local Workspace workspace;
  const int64_t blocks = (n + TOKENS - 1) / TOKENS, rows = left.width, cols = right.width;
  const int64_t row_panels = (rows + 31) / 32 * 2, col_panels = (cols + 31) / 32 * 2;
  bfloat16* packed_left = workspace.get((row_panels + col_panels) * blocks * TILE);
  bfloat16* packed_right = packed_left + row_panels * blocks * TILE;
  const auto places = places_of(wanted, k, cols);
  ThreadSums sums(k + rows + cols);
  Bounds bounds{rows,
                cols,
                least,
                std::vector<float>(row_panels * PANEL),
                std::vector<float>(col_panels * PANEL),
                std::vector<float>(row_panels),
                std::vector<float>(row_panels),
                std::vector<float>(col_panels),
                std::vector<bool>(rows * cols)};
  for (int64_t e = 0; e < num_excluded; ++e) bounds.excluded[excluded[e]] = true;
  const float underflow = std::sqrt(float(n)) * SQUARES_UNDERFLOW;
#pragma omp parallel
  {
    std::unique_ptr<float[]> columns(new float[(row_panels + col_panels) * PANEL * TOKENS]());
    float *of_left = columns.get(), *of_right = of_left + row_panels * PANEL * TOKENS, *own = sums.own();
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * TOKENS, tokens = std::min(TOKENS, n - first);
      if (tokens < TOKENS) std::fill_n(of_left, (row_panels + col_panels) * PANEL * TOKENS, 0.f);
      add_squares(left, first, tokens, own + k);  // reads ahead, row by row, for those that go across the rows
      add_squares(right, first, tokens, own + k + rows);
      transpose(left, first, tokens, of_left);
      transpose(right, first, tokens, of_right);
      pack_left(of_left, row_panels, block, blocks, packed_left);
      pack_right(right, of_right, col_panels, block, blocks, tokens, packed_right);
      add_dots(places, of_left, of_right, own);
    }
#pragma omp for schedule(static) nowait
    for (int64_t e = 0; e < k; ++e) taken[e] = sums.total(e);
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < rows; ++i) bounds.row_error[i] = std::sqrt(sums.total(k + i)) * rounding + underflow;
#pragma omp for schedule(static)
    for (int64_t j = 0; j < cols; ++j) bounds.norm[j] = std::sqrt(sums.total(k + rows + j)) + underflow;
#pragma omp single
    bounds.of_panels(row_panels, col_panels);

    const TileShapes shapes;
    alignas(64) float products[PANELS_AT_ONCE / 2][PANEL_PAIR] = {};
    for (int64_t chunk = 0; chunk < col_panels; chunk += PANELS_AT_ONCE) {
      const int64_t end = std::min(chunk + PANELS_AT_ONCE, col_panels);
#pragma omp for schedule(static) nowait
      for (int64_t i = 0; i < row_panels; i += 2) {
        for (int64_t b = 0; b < blocks; b += DEPTH)
          for (int64_t j = chunk; j < end; j += 2) {
            const bool same = b + DEPTH < blocks;  // panels, or the next ones?
            const int64_t panel = same ? i : std::min(i + 2, row_panels - 2), block = same ? b + DEPTH : 0;
            read_ahead(packed_left + (panel * blocks + block) * TILE, blocks, j - chunk, end - chunk);
            multiply(packed_left + i * blocks * TILE, packed_right + j * blocks * TILE, blocks, b,
                     std::min(b + DEPTH, blocks), products[(j - chunk) / 2]);
          }
        for (int64_t j = chunk; j < end; j += 2)
          for (int64_t q = 0; q < 4; ++q)
            compare(products[(j - chunk) / 2] + q * PANEL * PANEL, i + q / 2, j + q % 2, bounds, found);
      }
    }
  }
  return bounds.finite() ? found.number : -1;
}

}  // namespace

extern "C" {

bool can_survey() { return may_use_tiles(); }

int64_t survey_float32(const float* left, const float* right, int64_t n, int64_t rows, int64_t cols,
                       const int64_t* wanted, int64_t k, float* taken, const int64_t* excluded, int64_t num_excluded,
                       const float* least, float rounding, int64_t* found, float* most, int64_t room) {
  return survey(Factor<float>{left, rows}, Factor<float>{right, cols}, n, wanted, k, taken, excluded, num_excluded,
                least, rounding, Found{found, most, room});
}

int64_t survey_bfloat16(const bfloat16* left, const bfloat16* right, int64_t n, int64_t rows, int64_t cols,
                        const int64_t* wanted, int64_t k, float* taken, const int64_t* excluded, int64_t num_excluded,
                        const float* least, float rounding, int64_t* found, float* most, int64_t room) {
  return survey(Factor<bfloat16>{left, rows}, Factor<bfloat16>{right, cols}, n, wanted, k, taken, excluded,
                num_excluded, least, rounding, Found{found, most, room});
}
}

#else

extern "C" bool can_survey() { return false; }

#endif
