// The two types of numbers that factors have: float32 and bfloat16.

#pragma once

#include <cstdint>
#include <cstring>

using bfloat16 = uint16_t;  // the 16 bits of one

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float widen(float x) { return x; }

inline float widen(bfloat16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
