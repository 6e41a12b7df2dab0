// What is left to multiply while the sums grow: a tile is given up once its largest sum is too small even with all that
// the norms of the tokens to come allow. The blocks of tokens that add most come first, so that most are given up early.

#pragma once

#include "bounds.h"

namespace {

// The norms of ranked columns over the tokens to come: of each pair of panels the largest, after each group of blocks.
class Rest {
 public:
  Rest(const Ranked& ranked, const Norms& norms, const float* squares, const std::vector<int32_t>& order, int64_t depth,
       float slack)
      : pairs_(ranked.pairs()), largest_((order.size() + depth - 1) / depth * pairs_) {
    const int64_t blocks = order.size(), groups = (blocks + depth - 1) / depth;
#pragma omp parallel for schedule(static)
    for (int64_t pair = 0; pair < pairs_; ++pair) {
      float sums[PAIR] = {0};
      for (int64_t group = groups - 1; group >= 0; --group) {
        largest_[group * pairs_ + pair] = std::sqrt(*std::max_element(sums, sums + PAIR)) * slack + norms.underflow;
        for (int64_t b = group * depth; b < std::min((group + 1) * depth, blocks); ++b)
          for (int64_t c = 0; c < PAIR; ++c)
            sums[c] += squares[order[b] * norms.width() + ranked.places[pair * PAIR + c]];
      }
    }
  }

  float after(int64_t group, int64_t pair) const { return largest_[group * pairs_ + pair]; }

 private:
  int64_t pairs_;
  std::vector<float> largest_;
};

// Pairs of panels that still have a tile, and where their columns are in the factor.
struct Remaining {
  std::vector<int32_t> pairs, places;

  void list(const std::vector<char>& has_tile, int64_t first, const Ranked& ranked) {
    pairs.clear(), places.clear();
    for (size_t p = 0; p < has_tile.size(); ++p)
      if (has_tile[p]) {
        pairs.push_back(first + p);
        const auto begin = ranked.places.begin() + (first + p) * PAIR;
        places.insert(places.end(), begin, begin + PAIR);
      }
  }
};

// The tiles of the pairs of panels of rows from `start` to `stop` that still can reach what they have to.
class Survivors {
 public:
  Remaining rows, cols;

  Survivors(const Bounds& bounds, int64_t start, int64_t stop)
      : bounds_(bounds),
        start_(start),
        alive_(bounds.tiles_before[stop] - bounds.tiles_before[start], true),
        has_row_(stop - start),
        has_col_(*std::max_element(&bounds.reached[start], &bounds.reached[stop])) {
    narrow();
  }

  int64_t number() const { return alive_.size(); }
  bool has(int64_t i, int64_t j) const { return j < bounds_.reached[i] && alive_[at(i, j)]; }
  void drop(int64_t i, int64_t j) { alive_[at(i, j)] = false; }
  int64_t at(int64_t i, int64_t j) const { return bounds_.tiles_before[i] - bounds_.tiles_before[start_] + j; }

  // Lists the pairs that still have a tile.
  void narrow() {
    std::fill(has_row_.begin(), has_row_.end(), false);
    std::fill(has_col_.begin(), has_col_.end(), false);
    for (size_t i = 0; i < has_row_.size(); ++i)
      for (int64_t j = 0; j < bounds_.reached[start_ + i]; ++j)
        if (alive_[at(start_ + i, j)]) has_row_[i] = has_col_[j] = true;
    rows.list(has_row_, start_, bounds_.rows);
    cols.list(has_col_, 0, bounds_.cols);
  }

 private:
  const Bounds& bounds_;
  int64_t start_;
  std::vector<char> alive_, has_row_, has_col_;
};

}  // namespace
