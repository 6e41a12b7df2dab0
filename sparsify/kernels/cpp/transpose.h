// Blocks of 16 by 16 numbers, turned over in AVX-512's registers.

#pragma once

#include <immintrin.h>

#include <cstdint>

inline __m512 load(const float* numbers) { return _mm512_loadu_ps(numbers); }

inline __m512 load(const uint16_t* numbers) {  // bfloat16, widened
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
