// SIMD transpose of a square tile.

#pragma once

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "numbers.h"

#if defined(__AVX512F__)

constexpr int64_t SQUARE = 16;  // numbers in a row of a square

inline __m512 load(const float* numbers) { return _mm512_loadu_ps(numbers); }

inline __m512 load(const bfloat16* numbers) {
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// out[c][r] = in[r][c], of rows that are `in_pitch` and `out_pitch` numbers apart.
template <class T>
void transpose_square(const T* in, int64_t in_pitch, float* out, int64_t out_pitch) {
  constexpr int FIRST_AND_THIRD = 0x88, SECOND_AND_FOURTH = 0xdd;  // quarters of two registers
  const auto low = [](__m512 a, __m512 b) {                        // the pairs of numbers of each quarter
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto high = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  __m512 quads[4][4];  // [i][c]: quarter q has column 4 q + c of rows 4 i to 4 i + 3
  for (int i = 0; i < 4; ++i) {
    const T* rows = in + 4 * i * in_pitch;
    const __m512 r0 = load(rows), r1 = load(rows + in_pitch), r2 = load(rows + 2 * in_pitch),
                 r3 = load(rows + 3 * in_pitch);
    const __m512 low01 = _mm512_unpacklo_ps(r0, r1), high01 = _mm512_unpackhi_ps(r0, r1);
    const __m512 low23 = _mm512_unpacklo_ps(r2, r3), high23 = _mm512_unpackhi_ps(r2, r3);
    quads[i][0] = low(low01, low23), quads[i][1] = high(low01, low23);
    quads[i][2] = low(high01, high23), quads[i][3] = high(high01, high23);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 even01 = _mm512_shuffle_f32x4(quads[0][c], quads[1][c], FIRST_AND_THIRD);
    const __m512 even23 = _mm512_shuffle_f32x4(quads[2][c], quads[3][c], FIRST_AND_THIRD);
    const __m512 odd01 = _mm512_shuffle_f32x4(quads[0][c], quads[1][c], SECOND_AND_FOURTH);
    const __m512 odd23 = _mm512_shuffle_f32x4(quads[2][c], quads[3][c], SECOND_AND_FOURTH);
    _mm512_storeu_ps(out + c * out_pitch, _mm512_shuffle_f32x4(even01, even23, FIRST_AND_THIRD));
    _mm512_storeu_ps(out + (4 + c) * out_pitch, _mm512_shuffle_f32x4(odd01, odd23, FIRST_AND_THIRD));
    _mm512_storeu_ps(out + (8 + c) * out_pitch, _mm512_shuffle_f32x4(even01, even23, SECOND_AND_FOURTH));
    _mm512_storeu_ps(out + (12 + c) * out_pitch, _mm512_shuffle_f32x4(odd01, odd23, SECOND_AND_FOURTH));
  }
}

#elif defined(__AVX2__)

constexpr int64_t SQUARE = 8;

inline __m256 load(const float* numbers) { return _mm256_loadu_ps(numbers); }

inline __m256 load(const bfloat16* numbers) {
  const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

template <class T>
void transpose_square(const T* in, int64_t in_pitch, float* out, int64_t out_pitch) {
  constexpr int FIRST = 0x20, SECOND = 0x31;          // halves of two registers
  constexpr int FIRST_PAIR = 0x44, LAST_PAIR = 0xee;  // of each half of two registers
  __m256 quads[2][4];                                 // [i][c]: half h has column 4 h + c of rows 4 i to 4 i + 3
  for (int i = 0; i < 2; ++i) {
    const T* rows = in + 4 * i * in_pitch;
    const __m256 r0 = load(rows), r1 = load(rows + in_pitch), r2 = load(rows + 2 * in_pitch),
                 r3 = load(rows + 3 * in_pitch);
    const __m256 low01 = _mm256_unpacklo_ps(r0, r1), high01 = _mm256_unpackhi_ps(r0, r1);
    const __m256 low23 = _mm256_unpacklo_ps(r2, r3), high23 = _mm256_unpackhi_ps(r2, r3);
    quads[i][0] = _mm256_shuffle_ps(low01, low23, FIRST_PAIR);
    quads[i][1] = _mm256_shuffle_ps(low01, low23, LAST_PAIR);
    quads[i][2] = _mm256_shuffle_ps(high01, high23, FIRST_PAIR);
    quads[i][3] = _mm256_shuffle_ps(high01, high23, LAST_PAIR);
  }
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(out + c * out_pitch, _mm256_permute2f128_ps(quads[0][c], quads[1][c], FIRST));
    _mm256_storeu_ps(out + (4 + c) * out_pitch, _mm256_permute2f128_ps(quads[0][c], quads[1][c], SECOND));
  }
}

#else

constexpr int64_t SQUARE = 16;

template <class T>
void transpose_square(const T* in, int64_t in_pitch, float* out, int64_t out_pitch) {
  for (int64_t r = 0; r < SQUARE; ++r)
    for (int64_t c = 0; c < SQUARE; ++c) out[c * out_pitch + r] = widen(in[r * in_pitch + c]);
}

#endif
