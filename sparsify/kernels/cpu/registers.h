// Tiles of a product in float32, by any processor's vector registers.

#pragma once

#include "bounds.h"

namespace {

#if defined(__AVX512F__)
constexpr int64_t LANES = 16, MOST_ROWS = 16;  // numbers in a register; rows of a tile whose sums they all hold
#elif defined(__AVX__)
constexpr int64_t LANES = 8, MOST_ROWS = 6;
#elif defined(__aarch64__)
constexpr int64_t LANES = 4, MOST_ROWS = 6;
#else
constexpr int64_t LANES = 4, MOST_ROWS = 2;
#endif

class Registers {
 public:
  using Number = float;
  static constexpr int64_t DEPTH = 4;  // tiles that are multiplied before the next pair of panels has its turn

  explicit Registers(int64_t /* columns of the wider factor */) {}

  // Ranked columns of a block of tokens: each panel's are a tile, token by token; tiles are `pitch` numbers apart.
  template <class T>
  void pack_left(const Factor<T>& factor, int64_t first, int64_t tokens, const int32_t* places, int64_t panels,
                 float* packed, int64_t pitch) {
    const T* rows = factor.values + first * factor.width;
    for (int64_t p = 0; p < panels; ++p, places += PANEL, packed += pitch) {
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < PANEL; ++i) packed[t * PANEL + i] = widen(rows[t * factor.width + places[i]]);
      std::fill(packed + tokens * PANEL, packed + TILE, 0.f);
    }
  }

  template <class T>
  void pack_right(const Factor<T>& factor, int64_t first, int64_t tokens, const int32_t* places, int64_t panels,
                  float* packed, int64_t pitch) {
    pack_left(factor, first, tokens, places, panels, packed, pitch);
  }

  // Adds the products of two panels of left with two of right, over some blocks of tokens, to `sums`, or begins them.
  // A panel's tiles are `panel_pitch` numbers from the next one's.
  void multiply(const float* left, const float* right, int64_t panel_pitch, int64_t blocks, bool begins, float* sums) {
    for (int64_t q = 0; q < 4; ++q)
      add_rows<0>(left + q / 2 * panel_pitch, right + q % 2 * panel_pitch, blocks * TOKENS, begins, sums + q * QUARTER);
  }

 private:
  typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
  static constexpr int64_t VECTORS = PANEL / LANES;

  // The rows of a tile from one on, as many at a time as go, in about equal parts.
  template <int64_t FIRST>
  static void add_rows(const float* left, const float* right, int64_t tokens, bool begins, float* sums) {
    if constexpr (FIRST < PANEL) {
      constexpr int64_t REST = PANEL - FIRST, PARTS = (REST + MOST_ROWS - 1) / MOST_ROWS;
      constexpr int64_t ROWS = (REST + PARTS - 1) / PARTS;
      add_products<ROWS>(left + FIRST, right, tokens, begins, sums + FIRST * PANEL);
      add_rows<FIRST + ROWS>(left, right, tokens, begins, sums);
    }
  }

  template <int64_t ROWS>
  static void add_products(const float* left, const float* right, int64_t tokens, bool begins, float* sums) {
    Vector total[ROWS][VECTORS] = {};
    for (int64_t t = 0; t < tokens; ++t) {
      const Vector* columns = reinterpret_cast<const Vector*>(right + t * PANEL);
      for (int64_t i = 0; i < ROWS; ++i)
        for (int64_t v = 0; v < VECTORS; ++v) total[i][v] += left[t * PANEL + i] * columns[v];
    }
    // these tokens by themselves first: a sum over all of them one by one would round more
    Vector* stored = reinterpret_cast<Vector*>(sums);
    for (int64_t i = 0; i < ROWS; ++i)
      for (int64_t v = 0; v < VECTORS; ++v)
        stored[i * VECTORS + v] = begins ? total[i][v] : stored[i * VECTORS + v] + total[i][v];
  }
};

}  // namespace
