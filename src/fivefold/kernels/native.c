/* Fused element-wise kernels for CPUs: one pass over memory where PyTorch takes several.
 *
 * Compiled at first use by the machine's own C compiler (native.py) for the machine's own vector units, and
 * called through ctypes. Each kernel exists for float, bfloat16 and half; sums are kept in float. The loops are written
 * so that the compiler vectorises them; only store_row_bf16 knows a processor.
 *
 * This file is included by itself once a dtype: NAME(f) is f_fp32, f_bf16 or f_fp16, T the type in memory.
 */
#ifndef T
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16, fp16;
typedef int64_t i64;
#define BLOCK 1024 /* most elements that share a scale */
#define STRIPE 512 /* columns that are rounded at once */
#define ROW 2048   /* most columns of a row that stays in fp32 between two passes over it */

static inline uint32_t bits_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

static inline float float_of(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

static inline float load_fp32(const float *p) { return *p; }
static inline void store_fp32(float *p, float v) { *p = v; }

static inline float load_bf16(const bf16 *p) { return float_of((uint32_t)*p << 16); }

static inline void store_bf16(bf16 *p, float v) { /* round to nearest even; NaN stays NaN */
  uint32_t u = bits_of(v);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  uint32_t quiet_nan = (u >> 16) | 0x40u;
  *p = (bf16)(((u & 0x7fffffffu) > 0x7f800000u) ? quiet_nan : rounded);
}

/* By bits, as loops over instructions for half are not vectorised by all compilers. 2^112 moves the exponent to that of
 * a float, for subnormal numbers, too. */
static inline float load_fp16(const fp16 *p) {
  uint32_t h = *p, size = bits_of(float_of((h & 0x7fffu) << 13) * 5.192296858534828e33f);
  return float_of(size | (h & 0x8000u) << 16 | ((h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u));
}

static inline void store_fp16(fp16 *p, float v) { /* round to nearest even; 65520 and more is inf, NaN stays NaN */
  uint32_t u = bits_of(v);
  uint32_t a = u & 0x7fffffffu, normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  float shifted = fabsf(v) + 0.5f; /* whose last bit is 2^-24, as that of subnormal numbers below 2^-14 */
  uint32_t beyond = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  uint32_t size = a < 0x38800000u ? bits_of(shifted) - 0x3f000000u : (a < 0x47800000u ? normal : beyond);
  *p = (fp16)(size | (u >> 16 & 0x8000u));
}

/* exp(x) to a few ulp for -87.3 <= x <= 88.3, and 0 below; NaN stays NaN. k = x / ln 2, rounded, is in the last bits
 * of its sum with 1.5 * 2^23 + 127, which then are the exponent of 2^k. The rest is a polynomial whose coefficients
 * minimise the largest relative error (1.1e-7). Needs the order of its sums: no -fassociative-math. */
static inline float bounded_exp(float x) {
  float shifted = x * 1.44269504f + 12583039.0f, k = shifted - 12583039.0f;
  float r = x - k * 0.693359375f + k * 2.12194440e-4f;
  float p = 8.312520571e-3f;
  p = p * r + 4.189015552e-2f;
  p = p * r + 0.166671142f;
  p = p * r + 0.499992311f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return x < -87.3f ? 0.0f : p * float_of(bits_of(shifted) << 23);
}

/* The same for all x: exp(88.3) above. */
static inline float fast_exp(float x) { return bounded_exp(x > 88.3f ? 88.3f : x); }

/* GELU and its derivative (arXiv 1606.08415), by its tanh form or by erf. With Phi the normal distribution's cumulative
 * function: x * Phi(x). tanh form: x * sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3). erf: Abramowitz and Stegun
 * 7.1.26, whose error is below 1.5e-7. */
static inline float gelu_tanh(float x, float *slope) {
  float u = 1.59576912f * x * (1.0f + 0.044715f * x * x); /* 2u */
  float s = 1.0f / (1.0f + fast_exp(-u));
  *slope = s * (1.0f + x * (1.0f - s) * 1.59576912f * (1.0f + 0.134145f * x * x));
  return x * s;
}

static inline float gelu_erf(float x, float *slope) {
  float a = fabsf(x), t = 1.0f / (1.0f + 0.23164190f * a); /* 0.3275911 / sqrt(2) */
  float bell = bounded_exp(-0.5f * x * x);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  float tail = 0.5f * p * t * bell; /* Phi(-|x|) */
  float phi = x < 0.0f ? tail : 1.0f - tail;
  *slope = phi + x * bell * 0.39894228f;
  return x * phi;
}

/* to[i] = from[i] * factor. Processors with an instruction for bfloat16 make subnormal numbers 0. */
static inline void store_row_fp32(float *to, const float *from, float factor, i64 n) {
#pragma omp simd
  for (i64 i = 0; i < n; i++) to[i] = from[i] * factor;
}

static inline void store_row_bf16(bf16 *to, const float *from, float factor, i64 n) {
  i64 done = 0;
#ifdef __AVX512BF16__
  for (; done + 16 <= n; done += 16) {
    __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + done) * factor);
    memcpy(to + done, &rounded, 32);
  }
#endif
#pragma omp simd
  for (i64 i = done; i < n; i++) store_bf16(to + i, from[i] * factor);
}

static inline void store_row_fp16(fp16 *to, const float *from, float factor, i64 n) {
#pragma omp simd
  for (i64 i = 0; i < n; i++) store_fp16(to + i, from[i] * factor);
}

static inline float erf_slope(float x) {
  float slope;
  gelu_erf(x, &slope);
  return slope;
}

static inline float tanh_slope(float x) {
  float slope;
  gelu_tanh(x, &slope);
  return slope;
}

/* The keys [*low, *high) that row n of (matrices * Q, K) sees. bounds (sequences, Q, 2): the keys of each query, for
 * `heads` matrices in turn. Without bounds all K, or those up to offset + query if causal. */
static inline void keys_of(i64 n, i64 Q, i64 K, i64 offset, i64 causal, const int32_t *bounds, i64 heads, i64 *low,
                           i64 *high) {
  if (bounds) {
    const int32_t *own = bounds + ((n / Q / heads) * Q + n % Q) * 2;
    *low = own[0];
    *high = own[1];
  } else {
    *low = 0;
    *high = causal && offset + n % Q + 1 < K ? offset + n % Q + 1 : K;
  }
}

#define GLUE2(a, b) a##_##b
#define GLUE(a, b) GLUE2(a, b)
#define NAME(f) GLUE(f, DTYPE)
#define LOAD(p) NAME(load)(p)
#define STORE(p, v) NAME(store)(p, v)

/* to[i] = value, an expression of i, for i < n. 16 bits are rounded by whole stripes. */
#define STORE_EACH(to, n, value)                                                                                      \
  if (sizeof(T) == 4) {                                                                                               \
    _Pragma("omp simd") for (i64 i = 0; i < (n); i++) STORE((to) + i, value);                                         \
  } else                                                                                                              \
    for (i64 left = 0; left < (n); left += STRIPE) {                                                                  \
      i64 width = (n) - left < STRIPE ? (n) - left : STRIPE;                                                          \
      float stripe[STRIPE];                                                                                           \
      _Pragma("omp simd") for (i64 j = 0; j < width; j++) {                                                           \
        i64 i = left + j;                                                                                             \
        stripe[j] = value;                                                                                            \
      }                                                                                                               \
      NAME(store_row)((to) + left, stripe, 1.0f, width);                                                              \
    }

#define T float
#define DTYPE fp32
#include "native.c"
#undef T
#undef DTYPE
#define T bf16
#define DTYPE bf16
#include "native.c"
#undef T
#undef DTYPE
#define T fp16
#define DTYPE fp16
#include "native.c"

/* AdamW (arXiv 1711.05101), as in optim/adamw.py, of g * scale: p, m and v change, and the rounded p goes to `working`
 * if there is one. keep: 1 - lr * weight_decay. rate: lr over the first moment's correction. correct: 1 over the root of
 * the second moment's. *largest becomes the bits of the largest |p|, if that is larger: NaN is the largest. */
#define ADAMW(EXTRA)                                                                                                  \
  _Pragma("omp parallel for simd schedule(static) reduction(max : most)") for (i64 i = 0; i < n; i++) {               \
    float d = g[i] * scale, w;                                                                                        \
    m[i] += own_a * (d - m[i]);                                                                                       \
    v[i] = v[i] * beta_b + own_b * d * d;                                                                             \
    p[i] = w = p[i] * keep - rate * m[i] / (sqrtf(v[i]) * correct + eps);                                             \
    uint32_t u = bits_of(w) & 0x7fffffffu;                                                                            \
    most = u > most ? u : most;                                                                                       \
    EXTRA                                                                                                             \
  }
void adamw_fp32(float *p, const float *g, float *m, float *v, bf16 *working, uint32_t *largest, i64 n, float scale,
                float own_a, float beta_b, float own_b, float keep, float rate, float correct, float eps) {
  uint32_t most = *largest;
  if (working) {
    ADAMW(store_bf16(working + i, p[i]);)
  } else {
    ADAMW()
  }
  *largest = most;
}

/* Rounds x (rows, width) in place to bfloat16 numbers, up with a probability that is the distance from the lower one
 * (optim/rounding.py). The random bits are hashes of the index start + row * stride + column (hashing.py). */
void round_stochastic_bf16(float *x, i64 rows, i64 width, i64 start, i64 stride, i64 key_a, i64 key_b) {
  uint32_t *bits = (uint32_t *)x;
#pragma omp parallel for collapse(2) schedule(static)
  for (i64 r = 0; r < rows; r++) {
    for (i64 block = 0; block < width; block += 4096) {
      i64 end = block + 4096 < width ? block + 4096 : width;
#pragma omp simd
      for (i64 c = block; c < end; c++) {
        uint32_t h = (uint32_t)(start + r * stride + c) * 0x9E3779B1u + (uint32_t)key_a;
        h = (h ^ (h >> 16)) * 0x85EBCA6Bu ^ (uint32_t)key_b;
        h = (h ^ (h >> 13)) * 0xC2B2AE35u;
        h ^= h >> 16;
        uint32_t b = bits[r * width + c];
        h = (b & 0x7FFFFFFFu) > 0x7F800000u ? 0 : h & 0xFFFFu; /* else NaN may become -0 */
        bits[r * width + c] = (b + h) & 0xFFFF0000u;
      }
    }
  }
}

#else /* ------------------------------------------------------------------ the kernels, once a dtype */

/* The bits of |p|. As whole numbers they are in the order of sizes, and NaN is the largest. */
static inline uint32_t NAME(size_bits)(const T *p) { return bits_of(LOAD(p)) & 0x7fffffffu; }

/* total[i] += grad[i], or total[i] = grad[i] when first. */
void NAME(accumulate)(float *total, const T *grad, i64 n, i64 first) {
#pragma omp parallel for simd schedule(static)
  for (i64 i = 0; i < n; i++) total[i] = (first ? 0.0f : total[i]) + LOAD(grad + i);
}

/* The same for `batches` pieces of n, `step` apart in total. */
void NAME(accumulate_parts)(float *total, const T *part, i64 batches, i64 step, i64 n) {
#pragma omp parallel for schedule(static)
  for (i64 b = 0; b < batches; b++) {
#pragma omp simd
    for (i64 i = 0; i < n; i++) total[b * step + i] += LOAD(part + b * n + i);
  }
}

/* Blocks of at most B elements as whole numbers of 8 or 4 bits, times a scale each (rounded.py). Block c of a row is
 * x[starts[c]] .. x[starts[c + 1] - 1]. An encoded row has C blocks of B numbers, then C scales. Steps count elements
 * from row to row of x, and bytes of encoded ones. */
void NAME(quantize)(const T *x, i64 step, const i64 *starts, uint8_t *out, i64 out_step, i64 rows, i64 C, i64 B,
                    i64 bits) {
#pragma omp parallel for schedule(static)
  for (i64 k = 0; k < rows * C; k++) {
    i64 r = k / C, c = k % C, n = starts[c + 1] - starts[c];
    const T *from = x + r * step + starts[c];
    uint8_t *row = out + r * out_step, *to = row + c * (B * bits / 8);
    float block[BLOCK];
    uint32_t most = 0; /* as bits, NaN is the largest */
#pragma omp simd reduction(max : most)
    for (i64 i = 0; i < n; i++) {
      uint32_t u = NAME(size_bits)(from + i);
      most = u > most ? u : most;
      block[i] = LOAD(from + i);
    }
    for (i64 i = n; i < B; i++) block[i] = 0.0f;
    float scale = float_of(most) * (bits == 8 ? 1.0f / 127.0f : 1.0f / 7.0f);
    float by = scale > 1e-38f ? scale : 1e-38f;
    int8_t whole[BLOCK];
#pragma omp simd
    for (i64 i = 0; i < B; i++) whole[i] = (int8_t)(int32_t)rintf(block[i] / by);
    if (bits == 8)
      memcpy(to, whole, (size_t)B);
    else {
#pragma omp simd
      for (i64 i = 0; i < B / 2; i++) to[i] = (uint8_t)((whole[i] & 15) | (whole[i + B / 2] << 4));
    }
    memcpy(row + C * (B * bits / 8) + 4 * c, &scale, 4);
  }
}

/* The inverse of quantize; with `add`, the elements are added to those of y. */
void NAME(dequantize)(T *y, i64 step, const i64 *starts, const uint8_t *in, i64 in_step, i64 rows, i64 C, i64 B,
                      i64 bits, i64 add) {
#pragma omp parallel for schedule(static)
  for (i64 k = 0; k < rows * C; k++) {
    i64 r = k / C, c = k % C, n = starts[c + 1] - starts[c];
    T *to = y + r * step + starts[c];
    const uint8_t *row = in + r * in_step, *from = row + c * (B * bits / 8);
    float scale;
    memcpy(&scale, row + C * (B * bits / 8) + 4 * c, 4);
    int8_t whole[BLOCK];
    if (bits == 8)
      memcpy(whole, from, (size_t)B);
    else {
#pragma omp simd
      for (i64 i = 0; i < B / 2; i++) {
        whole[i] = (int8_t)((int8_t)(from[i] << 4) >> 4);
        whole[i + B / 2] = (int8_t)((int8_t)from[i] >> 4);
      }
    }
#pragma omp simd
    for (i64 i = 0; i < n; i++) STORE(to + i, (add ? LOAD(to + i) : 0.0f) + (float)whole[i] * scale);
  }
}

static inline float NAME(round_to)(float v, float keep, float least) {
  float distance = float_of(bits_of(v) & 0x7f800000u) * keep; /* from the power of two below |v| */
  distance = distance > least ? distance : least;
  float shift = distance * 12582912.0f; /* 1.5 * 2^23: a sum with it is a multiple of the distance */
  return (v + shift) - shift;
}

/* out = x (rows, D), rounded to a narrow format (fp8.py). A tile of R rows and C columns is scaled by a power of two so
 * that its largest number is at most `largest`, and back: the numbers keep `fraction` bits, and are multiples of the
 * tile's smallest number. One that is not finite makes its tile NaN. highest, lowest: exponents of the format's normal numbers. */
void NAME(round_tiles)(const T *x, T *out, i64 rows, i64 D, i64 R, i64 C, i64 fraction, i64 highest, i64 lowest,
                       float largest) {
  i64 W = C >= STRIPE ? C : STRIPE / C * C; /* columns at once */
  i64 stripes = (D + W - 1) / W, bands = (rows + R - 1) / R;
  float keep = ldexpf(1.0f, -(int)fraction);
  uint32_t full = bits_of(largest) & 0x7fffffu; /* the fraction of the largest number */
#pragma omp parallel for schedule(static)
  for (i64 k = 0; k < bands * stripes; k++) {
    i64 first = k / stripes * R, last = first + R < rows ? first + R : rows;
    i64 left = k % stripes * W, n = left + W < D ? W : D - left;
    uint32_t most[STRIPE] = {0}; /* the largest number of each tile, as bits */
    float least[STRIPE];         /* the distance of its subnormal numbers */
    for (i64 r = first; r < last; r++) {
      const T *row = x + r * D + left;
      if (C == 1) {
#pragma omp simd
        for (i64 i = 0; i < n; i++) {
          uint32_t u = NAME(size_bits)(row + i);
          most[i] = u > most[i] ? u : most[i];
        }
      } else {
        for (i64 g = 0; g * C < n; g++) {
          i64 end = (g + 1) * C < n ? (g + 1) * C : n;
          uint32_t top = most[g];
#pragma omp simd reduction(max : top)
          for (i64 i = g * C; i < end; i++) {
            uint32_t u = NAME(size_bits)(row + i);
            top = u > top ? u : top;
          }
          most[g] = top;
        }
      }
    }
    for (i64 g = 0; g * C < n; g++) {
      i64 power = lowest - fraction - highest + (i64)(most[g] >> 23) - 127 + ((most[g] & 0x7fffffu) > full);
      uint32_t u = (uint32_t)((power > -120 ? power : -120) + 127) << 23;
      least[g] = float_of(most[g] >= 0x7f800000u ? 0x7fc00000u : u); /* NaN: one is not finite */
    }
    for (i64 r = first; r < last; r++) {
      const T *row = x + r * D + left;
      T *to = out + r * D + left;
      if (C == 1) {
#pragma omp simd
        for (i64 i = 0; i < n; i++) STORE(to + i, NAME(round_to)(LOAD(row + i), keep, least[i]));
      } else {
        for (i64 g = 0; g * C < n; g++) {
          i64 end = (g + 1) * C < n ? (g + 1) * C : n;
          float lowest_distance = least[g];
#pragma omp simd
          for (i64 i = g * C; i < end; i++) STORE(to + i, NAME(round_to)(LOAD(row + i), keep, lowest_distance));
        }
      }
    }
  }
}

/* y = (x - mean) * rstd * w + b with rstd = 1/sqrt(variance + eps), by rows of D: LayerNorm, whose statistics (rows, 2)
 * are mean and rstd. Without b RMSNorm: the mean counts as 0, and the only statistic is rstd. With `residual`, x +=
 * residual comes first and the sum is written to `sum`. */
void NAME(norm_forward)(const T *x, const T *residual, const T *w, const T *b, T *sum, T *y, float *statistics, i64 rows,
                        i64 D, float eps) {
#pragma omp parallel for schedule(static)
  for (i64 n = 0; n < rows; n++) {
    const T *xn = x + n * D;
    float total = 0.0f, square = 0.0f;
    if (residual) {
      const T *rn = residual + n * D;
      T *sn = sum + n * D;
      STORE_EACH(sn, D, LOAD(xn + i) + LOAD(rn + i))
      xn = sn;
    }
    if (b) {
#pragma omp simd reduction(+ : total)
      for (i64 i = 0; i < D; i++) total += LOAD(xn + i);
    }
    float mean = total / (float)D;
#pragma omp simd reduction(+ : square)
    for (i64 i = 0; i < D; i++) square += (LOAD(xn + i) - mean) * (LOAD(xn + i) - mean);
    float r = 1.0f / sqrtf(square / (float)D + eps);
    if (b) statistics[2 * n] = mean;
    statistics[b ? 2 * n + 1 : n] = r;
    T *yn = y + n * D;
    if (b) {
      STORE_EACH(yn, D, (LOAD(xn + i) - mean) * r * LOAD(w + i) + LOAD(b + i))
    } else {
      STORE_EACH(yn, D, LOAD(xn + i) * r * LOAD(w + i))
    }
  }
}

/* dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) (+ carry), g = dy*w, xhat = (x - mean)*rstd; dw = sum over rows of
 * dy*xhat, db = sum over rows of dy, one after the other in dwb (parts, D). parts: 1 for RMSNorm, which has neither db
 * nor mean(g). `carry` is the gradient that reaches x past the norm (the residual stream), or null. `scratch`: threads x
 * parts x D floats. */
void NAME(norm_backward)(const T *dy, const T *x, const T *w, const float *statistics, const T *carry, T *dx, float *dwb,
                         float *scratch, i64 parts, i64 rows, i64 D, i64 threads) {
  memset(scratch, 0, sizeof(float) * (size_t)(threads * parts * D));
#pragma omp parallel for schedule(static) num_threads((int)threads)
  for (i64 t = 0; t < threads; t++) {
    float *dw = scratch + t * parts * D, *db = dw + D;
    for (i64 n = rows * t / threads; n < rows * (t + 1) / threads; n++) {
      const T *dyn = dy + n * D, *xn = x + n * D, *cn = carry ? carry + n * D : NULL;
      float mean = parts > 1 ? statistics[2 * n] : 0.0f, r = statistics[parts * n + parts - 1];
      float dot = 0.0f, total = 0.0f;
#pragma omp simd reduction(+ : dot, total)
      for (i64 i = 0; i < D; i++) {
        float g = LOAD(dyn + i) * LOAD(w + i);
        total += g;
        dot += g * (LOAD(xn + i) - mean);
      }
      float c = dot * r * r / (float)D, m = parts > 1 ? total / (float)D : 0.0f;
      if (parts > 1) {
#pragma omp simd
        for (i64 i = 0; i < D; i++) {
          dw[i] += LOAD(dyn + i) * (LOAD(xn + i) - mean) * r;
          db[i] += LOAD(dyn + i);
        }
      } else {
#pragma omp simd
        for (i64 i = 0; i < D; i++) dw[i] += LOAD(dyn + i) * LOAD(xn + i) * r;
      }
      STORE_EACH(dx + n * D, D,
                 r * (LOAD(dyn + i) * LOAD(w + i) - m - c * (LOAD(xn + i) - mean)) + (cn ? LOAD(cn + i) : 0.0f))
    }
  }
  for (i64 i = 0; i < parts * D; i++) {
    float s = 0.0f;
    for (i64 t = 0; t < threads; t++) s += scratch[t * parts * D + i];
    dwb[i] = s;
  }
}

/* out = gelu(x), over n elements. exact: by erf. */
void NAME(gelu_forward)(const T *x, T *out, i64 n, i64 exact) {
#pragma omp parallel for schedule(static)
  for (i64 first = 0; first < n; first += STRIPE) {
    const T *own = x + first;
    i64 count = n - first < STRIPE ? n - first : STRIPE;
    float slope;
    if (exact) {
      STORE_EACH(out + first, count, gelu_erf(LOAD(own + i), &slope))
    } else {
      STORE_EACH(out + first, count, gelu_tanh(LOAD(own + i), &slope))
    }
  }
}

void NAME(gelu_backward)(const T *dout, const T *x, T *dx, i64 n, i64 exact) {
#pragma omp parallel for schedule(static)
  for (i64 first = 0; first < n; first += STRIPE) {
    const T *own = x + first, *d = dout + first;
    i64 count = n - first < STRIPE ? n - first : STRIPE;
    if (exact) {
      STORE_EACH(dx + first, count, LOAD(d + i) * erf_slope(LOAD(own + i)))
    } else {
      STORE_EACH(dx + first, count, LOAD(d + i) * tanh_slope(LOAD(own + i)))
    }
  }
}

/* out = silu(gate) * up; the rows of gate_up hold gate (F) and then up (F). */
void NAME(swiglu_forward)(const T *gate_up, T *out, i64 rows, i64 F) {
#pragma omp parallel for schedule(static)
  for (i64 n = 0; n < rows; n++) {
    const T *g = gate_up + n * 2 * F, *u = g + F;
    T *o = out + n * F;
    STORE_EACH(o, F, LOAD(g + i) / (1.0f + fast_exp(-LOAD(g + i))) * LOAD(u + i))
  }
}

void NAME(swiglu_backward)(const T *dout, const T *gate_up, T *dgate_up, i64 rows, i64 F) {
#pragma omp parallel for schedule(static)
  for (i64 n = 0; n < rows; n++) {
    const T *g = gate_up + n * 2 * F, *u = g + F, *d = dout + n * F;
    T *dg = dgate_up + n * 2 * F, *du = dg + F;
    for (i64 left = 0; left < F; left += STRIPE) {
      i64 width = F - left < STRIPE ? F - left : STRIPE;
      float of_gate[STRIPE], of_up[STRIPE];
#pragma omp simd
      for (i64 j = 0; j < width; j++) {
        i64 i = left + j;
        float a = LOAD(g + i), s = 1.0f / (1.0f + fast_exp(-a)), v = LOAD(d + i);
        of_gate[j] = v * LOAD(u + i) * s * (1.0f + a * (1.0f - s));
        of_up[j] = v * a * s;
      }
      NAME(store_row)(dg + left, of_gate, 1.0f, width);
      NAME(store_row)(du + left, of_up, 1.0f, width);
    }
  }
}

/* y = w x + b, w (F, D), b or null. Several rows at once, so that sums do not wait for each other. */
void NAME(matrix_vector)(const T *w, const float *x, const T *b, T *y, i64 F, i64 D) {
#pragma omp parallel for schedule(static)
  for (i64 k = 0; k < (F + 3) / 4; k++) {
    i64 f = 4 * k;
    if (f + 4 > F) {
      for (; f < F; f++) {
        float s = 0.0f;
#pragma omp simd reduction(+ : s)
        for (i64 i = 0; i < D; i++) s += LOAD(w + f * D + i) * x[i];
        STORE(y + f, b ? s + LOAD(b + f) : s);
      }
      continue;
    }
    const T *w0 = w + f * D, *w1 = w0 + D, *w2 = w1 + D, *w3 = w2 + D;
    float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (i64 i = 0; i < D; i++) {
      s0 += LOAD(w0 + i) * x[i];
      s1 += LOAD(w1 + i) * x[i];
      s2 += LOAD(w2 + i) * x[i];
      s3 += LOAD(w3 + i) * x[i];
    }
    float s[4] = {s0, s1, s2, s3};
    for (i64 j = 0; j < 4; j++) STORE(y + f + j, b ? s[j] + LOAD(b + f + j) : s[j]);
  }
}

/* Rotates heads of d numbers by the angles of cos and sin (tokens, d/2), times `way`: 1, or -1 for the way back. Without
 * cos it only copies them. x has a sequence every xb, a head every xh, a token every xt elements; out likewise. */
void NAME(rope)(const T *x, const float *cos, const float *sin, T *out, i64 B, i64 heads, i64 tokens, i64 d, i64 xb,
                i64 xh, i64 xt, i64 ob, i64 oh, i64 ot, float way) {
  i64 half = d / 2;
#pragma omp parallel for collapse(2) schedule(static)
  for (i64 b = 0; b < B; b++)
    for (i64 t = 0; t < tokens; t++)
      for (i64 h = 0; h < heads; h++) {
        const T *p = x + b * xb + h * xh + t * xt;
        T *o = out + b * ob + h * oh + t * ot;
        if (!cos) {
          memcpy(o, p, sizeof(T) * (size_t)d);
          continue;
        }
        const float *c = cos + t * half, *s = sin + t * half;
#pragma omp simd
        for (i64 i = 0; i < half; i++) {
          float a = LOAD(p + i), z = LOAD(p + half + i), turn = way * s[i];
          STORE(o + i, a * c[i] - z * turn);
          STORE(o + half + i, z * c[i] + a * turn);
        }
      }
}

/* What the loops below share. The largest of n values; the sum of exp(value - top). */
static inline float NAME(largest)(const T *p, i64 n) {
  float top = -INFINITY;
#pragma omp simd reduction(max : top)
  for (i64 i = 0; i < n; i++) {
    float v = LOAD(p + i);
    top = v > top ? v : top;
  }
  return top;
}

static inline float NAME(sum_exp)(const T *p, i64 n, float top) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (i64 i = 0; i < n; i++) sum += bounded_exp(LOAD(p + i) - top);
  return sum;
}

/* Softmax of scale * scores in place, by rows of K keys. Row q of a matrix of Q queries sees the keys up to
 * offset + q when causal, else all; what it does not see becomes 0. The logarithm of each row's sum of exponents goes
 * to lse (matrices, Q), unless that is null. */
void NAME(softmax_forward)(T *scores, float *lse, i64 matrices, i64 Q, i64 K, i64 offset, i64 causal, float scale,
                           const int32_t *bounds, i64 heads) {
#pragma omp parallel for schedule(static)
  for (i64 n = 0; n < matrices * Q; n++) {
    i64 low, high;
    keys_of(n, Q, K, offset, causal, bounds, heads, &low, &high);
    T *p = scores + n * K + low;
    i64 seen = high - low;
    memset(p - low, 0, sizeof(T) * (size_t)low);
    memset(p + seen, 0, sizeof(T) * (size_t)(K - high));
    if (seen <= 0) {
      if (lse) lse[n] = -INFINITY;
      continue;
    }
    float top = NAME(largest)(p, seen), sum = 0.0f, row[ROW];
    for (i64 first = 0; first < seen; first += ROW) {
      i64 width = seen - first < ROW ? seen - first : ROW;
#pragma omp simd reduction(+ : sum)
      for (i64 i = 0; i < width; i++) {
        float e = bounded_exp((LOAD(p + first + i) - top) * scale);
        sum += e;
        row[i] = e;
      }
      if (seen > ROW) NAME(store_row)(p + first, row, 1.0f, width);
    }
    if (lse) lse[n] = logf(sum) + top * scale;
    float inverse = 1.0f / sum;
    if (seen > ROW) {
      STORE_EACH(p, seen, LOAD(p + i) * inverse)
    } else
      NAME(store_row)(p, row, inverse, seen);
  }
}

/* Its gradient, given lse over all keys and delta = sum(dout * out) of each row: scores becomes the probabilities
 * p = exp(scale * scores - lse), dp becomes scale * p * (dp - delta). */
void NAME(softmax_lse_backward)(T *scores, T *dp, const float *lse, const float *delta, i64 matrices, i64 Q, i64 K,
                                i64 offset, i64 causal, float scale, const int32_t *bounds, i64 heads) {
#pragma omp parallel for schedule(static)
  for (i64 n = 0; n < matrices * Q; n++) {
    i64 low, high;
    keys_of(n, Q, K, offset, causal, bounds, heads, &low, &high);
    T *p = scores + n * K + low, *g = dp + n * K + low;
    i64 seen = high - low;
    float l = lse[n], c = delta[n];
#pragma omp simd
    for (i64 i = 0; i < seen; i++) {
      float e = bounded_exp(LOAD(p + i) * scale - l);
      STORE(g + i, scale * e * (LOAD(g + i) - c));
      STORE(p + i, e);
    }
    memset(p - low, 0, sizeof(T) * (size_t)low);
    memset(g - low, 0, sizeof(T) * (size_t)low);
    memset(p + seen, 0, sizeof(T) * (size_t)(K - high));
    memset(g + seen, 0, sizeof(T) * (size_t)(K - high));
  }
}

/* dscores = scale * p * (dp - sum(p * dp)), written over dp. */
void NAME(softmax_backward)(const T *probabilities, T *dp, i64 matrices, i64 Q, i64 K, i64 offset, i64 causal,
                            float scale, const int32_t *bounds, i64 heads) {
#pragma omp parallel for schedule(static)
  for (i64 n = 0; n < matrices * Q; n++) {
    i64 low, high;
    keys_of(n, Q, K, offset, causal, bounds, heads, &low, &high);
    const T *p = probabilities + n * K + low;
    T *g = dp + n * K + low;
    i64 seen = high - low;
    float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
    for (i64 i = 0; i < seen; i++) dot += LOAD(p + i) * LOAD(g + i);
    STORE_EACH(g, seen, scale * LOAD(p + i) * (LOAD(g + i) - dot))
    memset(g - low, 0, sizeof(T) * (size_t)low);
    memset(g + seen, 0, sizeof(T) * (size_t)(K - high));
  }
}

/* The gradient of a row's cross-entropy in place of its V logits: (exp(logit - shift) / norm - onehot(target)) * scale.
 * Where the target is no column from 0 to V - 1, the row has none. */
static inline void NAME(cross_entropy_gradient)(T *p, i64 V, i64 target, float shift, float norm, float scale) {
  int here = target >= 0 && target < V;
  float at_target = here ? LOAD(p + target) : 0.0f, factor = scale / norm;
  STORE_EACH(p, V, bounded_exp(LOAD(p + i) - shift) * factor)
  if (here) STORE(p + target, (bounded_exp(at_target - shift) / norm - 1.0f) * scale);
}

/* Cross-entropy of rows of V logits, and its gradient in their place: losses[n] = logsumexp - logit[target],
 * logits = (softmax - onehot(target)) * scale[0]. Target < 0: loss 0, gradient 0. */
void NAME(cross_entropy)(T *logits, const i64 *targets, float *losses, const float *scale, i64 rows, i64 V) {
#pragma omp parallel for schedule(static)
  for (i64 n = 0; n < rows; n++) {
    T *p = logits + n * V;
    i64 target = targets[n];
    if (target < 0) {
      losses[n] = 0.0f;
      memset(p, 0, sizeof(T) * (size_t)V);
      continue;
    }
    float top = NAME(largest)(p, V), sum = NAME(sum_exp)(p, V, top);
    losses[n] = logf(sum) + top - LOAD(p + target);
    NAME(cross_entropy_gradient)(p, V, target, top, sum, scale[0]);
  }
}

/* Cross-entropy where this process has only a part of the vocabulary, columns first .. first + V of the logits:
 * statistics (3, rows): the largest logit here, sum of exp(logit - largest), and the logit of the target, 0 where it
 * lies elsewhere. */
void NAME(vocabulary_statistics)(const T *logits, const i64 *targets, float *out, i64 rows, i64 V, i64 first) {
#pragma omp parallel for schedule(static)
  for (i64 n = 0; n < rows; n++) {
    const T *p = logits + n * V;
    i64 target = targets[n] - first;
    out[n] = NAME(largest)(p, V);
    out[rows + n] = NAME(sum_exp)(p, V, out[n]);
    out[2 * rows + n] = target >= 0 && target < V ? LOAD(p + target) : 0.0f;
  }
}

/* Its gradient in place of the logits, given the log-sum-exp over the whole vocabulary:
 * (exp(logit - lse) - onehot(target)) * scale[0]. A row with target < 0 gets zeros. */
void NAME(vocabulary_gradient)(T *logits, const i64 *targets, const float *lse, const float *scale, i64 rows, i64 V,
                               i64 first) {
#pragma omp parallel for schedule(static)
  for (i64 n = 0; n < rows; n++) {
    T *p = logits + n * V;
    if (targets[n] < 0)
      memset(p, 0, sizeof(T) * (size_t)V);
    else
      NAME(cross_entropy_gradient)(p, V, targets[n] - first, lse[n], 1.0f, scale[0]);
  }
}
#endif
