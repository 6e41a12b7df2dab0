// Tiles of a product in bfloat16, by a processor's matrix units (AMX).

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "bounds.h"

namespace {

class MatrixUnits {
 public:
  using Number = bfloat16;
  static constexpr int64_t GATHERED_COST = 8;  // of a number that is read by itself, to one of a whole factor's
  static constexpr int64_t DEPTH = 8;          // tiles that are multiplied before the next pair of panels has its turn

  static bool may_be_used() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool may = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return may;
  }

  // Sets the units' shapes for its own lifetime, and restores those that were set before.
  explicit MatrixUnits(int64_t widest) : columns_(new float[widest * TOKENS]()) {
    Shapes ours;
    for (int i = 0; i < 8; ++i) ours.bytes[i] = 64, ours.rows[i] = 16;
    ours.palette = 1;
    _tile_storeconfig(&before_);
    _tile_loadconfig(&ours);
  }
  ~MatrixUnits() {
    if (before_.palette)
      _tile_loadconfig(&before_);
    else
      _tile_release();
  }

  // Ranked columns of a block of tokens: each panel's are a tile, a column in each of its rows; tiles are `pitch`
  // numbers apart.
  template <class T>
  void pack_left(const Factor<T>& factor, int64_t first, int64_t tokens, const int32_t* places, int64_t panels,
                 bfloat16* packed, int64_t pitch) {
    lay_out(factor, first, tokens, places, panels * PANEL);
    for (int64_t p = 0; p < panels; ++p) round_panel(p * PANEL, packed + p * pitch);
  }

  // The same for the right factor: 16 pairs of tokens by 16 columns, the two of a pair side by side.
  template <class T>
  void pack_right(const Factor<T>& factor, int64_t first, int64_t tokens, const int32_t* places, int64_t panels,
                  bfloat16* packed, int64_t pitch) {
    lay_out(factor, first, tokens, places, panels * PANEL);
    alignas(64) float pairs[PANEL * PANEL];
    for (int64_t p = 0; p < panels; ++p) {
      round_panel(p * PANEL, reinterpret_cast<bfloat16*>(pairs));
      transpose_square(pairs, PANEL, reinterpret_cast<float*>(packed + p * pitch), PANEL);
    }
  }

  // Adds the products of two panels of left with two of right, over some blocks of tokens, to `sums`, or begins them.
  // A panel's tiles are `panel_pitch` numbers from the next one's.
  void multiply(const bfloat16* left, const bfloat16* right, int64_t panel_pitch, int64_t blocks, bool begins,
                float* sums) {
    const bfloat16 *l0 = left, *l1 = left + panel_pitch, *r0 = right, *r1 = right + panel_pitch;
    if (begins) {
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
    for (int64_t b = 0; b < blocks; ++b) {
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

 private:
  struct alignas(64) Shapes {
    uint8_t palette = 0, start = 0, reserved[14] = {0};
    uint16_t bytes[16] = {0};
    uint8_t rows[16] = {0};
  };

  // Transposes the columns at some places: one by one where they are few, else with the whole factor.
  template <class T>
  void lay_out(const Factor<T>& factor, int64_t first, int64_t tokens, const int32_t* places, int64_t number) {
    if (tokens < TOKENS) std::fill_n(columns_.get(), factor.width * TOKENS, 0.f);
    laid_out_ = number * GATHERED_COST <= factor.width ? nullptr : places;
    if (laid_out_) return transpose(factor, first, tokens, columns_.get());
    for (int64_t t = 0; t < tokens; ++t) {
      const T* row = factor.values + (first + t) * factor.width;
      for (int64_t c = 0; c < number; ++c) columns_[c * TOKENS + t] = widen(row[places[c]]);
    }
  }

  // The columns of a panel from one on, 32 tokens each, rounded: each is a row of the tile.
  void round_panel(int64_t first, bfloat16* tile) {
    for (int64_t c = 0; c < PANEL; ++c) {
      const float* column = columns_.get() + (laid_out_ ? laid_out_[first + c] : first + c) * TOKENS;
      const __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(column + SQUARE), _mm512_loadu_ps(column));
      _mm512_storeu_si512(tile + c * TOKENS, reinterpret_cast<__m512i>(rounded));
    }
  }

  std::unique_ptr<float[]> columns_;  // of a factor, for a block of tokens
  const int32_t* laid_out_;           // where the ranked ones are among them; null: one after the other
  Shapes before_;
};

}  // namespace
