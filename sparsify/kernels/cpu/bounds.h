// The entries of a product that can reach their row's threshold, by the norms; how far they may be off; and those that
// do reach it.

#pragma once

#include <cmath>

#include "norms.h"

namespace {

constexpr int64_t PANEL = 16;               // rows, or columns, of a tile of the product
constexpr int64_t PAIR = 2 * PANEL;         // two panels, which are multiplied together
constexpr int64_t QUARTER = PANEL * PANEL;  // entries of a tile: a pair of panels and a pair of panels make four
constexpr int64_t TILE = PANEL * TOKENS;    // numbers in a tile of a factor

// Rows, or columns, of the product that are not ruled out, about in descending order of their bounds. A row's bound
// times a column's is the largest abs(entry) by the norms, in multiples of the row's threshold: below 1 it is ruled
// out.
struct Ranked {
  int64_t number = 0;
  std::vector<int32_t> places;    // in the factor; filled up to whole pairs of panels
  std::vector<float> pair_bound;  // of two panels, the largest

  int64_t pairs() const { return pair_bound.size(); }
};

inline Ranked rank(const std::vector<float>& bounds, float other) {
  constexpr int SHIFT = 18;  // of a float's bits, which order as it does: one key for what differs by 3 %
  constexpr int64_t KEYS = int64_t(0x7f800000 >> SHIFT) + 1;
  std::vector<int32_t> ends(KEYS + 1);
  const auto key = [](float x) { return KEYS - 1 - (bits_of(x) >> SHIFT); };
  Ranked ranked;
  for (float x : bounds)
    if (x * other >= 1) ++ends[key(x) + 1], ++ranked.number;
  for (int64_t i = 1; i <= KEYS; ++i) ends[i] += ends[i - 1];
  const int64_t pairs = (ranked.number + PAIR - 1) / PAIR;
  ranked.places.resize(pairs * PAIR);
  ranked.pair_bound.resize(pairs);
  for (size_t i = 0; i < bounds.size(); ++i)
    if (bounds[i] * other >= 1) {
      const int64_t at = ends[key(bounds[i])]++;
      ranked.places[at] = i;
      ranked.pair_bound[at / PAIR] = std::max(ranked.pair_bound[at / PAIR], bounds[i]);
    }
  return ranked;
}

struct Found {
  int64_t* indices;
  float *values, *most;
  int64_t capacity;
  int64_t number = 0;

  void add(int64_t index, float value, float size) {
    int64_t at;
#pragma omp atomic capture
    at = number++;
    if (at < capacity) indices[at] = index, values[at] = value, most[at] = size;
  }
};

// The thresholds, the errors of the entries, and the entries that are no candidates.
struct Bounds {
  Ranked rows, cols;
  int64_t width;                              // columns of the whole product
  std::vector<float> least, row_error, norm;  // as ranked; an entry is off by row_error[i] * norm[j] at most
  std::vector<float> panel_least, panel_error, panel_norm;
  std::vector<int64_t> pairs_left;  // for each pair of rows' panels: how many pairs of columns' are not ruled out
  std::vector<bool> excluded;    // (rows * cols,)

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
    for (float row_bound : rows.pair_bound) {
      int64_t pairs = cols.pairs();
      while (pairs && row_bound * cols.pair_bound[pairs - 1] < 1) --pairs;
      pairs_left.push_back(pairs);
    }
  }

  // Number of entries to multiply: whole pairs of panels.
  int64_t to_multiply() const {
    int64_t total = 0;
    for (int64_t pairs : pairs_left) total += pairs * PAIR * PAIR;
    return total;
  }

  // Adds those of a tile's entries that could reach their row's threshold.
  void compare(const float* tile, int64_t row_panel, int64_t col_panel, Found& found) const {
    float largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t e = 0; e < QUARTER; ++e) largest = std::max(largest, std::abs(tile[e]));
    if (largest + panel_error[row_panel] * panel_norm[col_panel] < panel_least[row_panel]) return;
    const int64_t first = col_panel * PANEL, last = std::min(cols.number, first + PANEL);
    for (int64_t i = row_panel * PANEL; i < std::min(rows.number, (row_panel + 1) * PANEL); ++i, tile += PANEL)
      for (int64_t j = first; j < last; ++j) {
        const float most = std::abs(tile[j - first]) + row_error[i] * norm[j];
        const int64_t index = rows.places[i] * width + cols.places[j];
        if (most >= least[i] && !excluded[index]) found.add(index, tile[j - first], most);
      }
  }
};

}  // namespace
