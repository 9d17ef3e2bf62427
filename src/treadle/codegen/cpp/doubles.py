"""The C++ functions of float64, in the style of ``prelude.py``: arithmetic that runs by lanes.

Results are within six units in the last place. What a lane computes is also computed for what is
left at the end of a row, so that no value depends on where it stands; the library's own lanes
(``sin`` of more than 2^36) do not promise that. Coefficients without a formula are Chebyshev's
approximations of what the comments say.
"""

from collections.abc import Sequence
from math import factorial, pi

_LN2_HIGH = 0.6931471803691238  # 32 bits: its product with an exponent is exact
_LN2_LOW = 1.9082149292705877e-10
_LN2_INVERSE = 1.4426950408889634
_HALF_PI = (pi / 2, 6.123233995736766e-17, -1.4973849048591698e-33)
"""Parts of one number: with the first two exact products cancel to 2^-106 of the argument."""
_ROUNDER = 6755399441055744.0
"""1.5 * 2^52: the bits of a sum with it end in those of the other term as an integer."""
_EXP_LAST = 709.782712893384
_HALF_EXP_LAST = 710.4758600739439
"""The largest numbers whose exponential, and half of whose exponential, is a float64."""
_EXP = [1 / factorial(k) for k in range(14, 1, -1)]
_LOG = [2 / (2 * k + 1) for k in range(10, 0, -1)]
_ERF = (
    5.957176147748911e-11, -1.1372848856791674e-09, 1.4659775274047436e-08,
    -1.6350312701054695e-07, 1.6461000484121368e-06, -1.4925595266831182e-05,
    0.0001205533111164271, -0.000854832698083379, 0.0052239776248180145, -0.026866170645076792,
    0.11283791670954879, -0.3761263890318375, 1.1283791670955126,
)  # fmt: skip
_ERFC = (
    -8.981918647880284e-10, -4.7579011907851015e-09, 2.2768147564637812e-10, 4.0142388637276283e-08,
    1.7691526051248628e-08, -2.6234605811699485e-07, -5.2878886607894764e-08,
    1.7554196514698013e-06, -9.755947010966708e-07, -1.144637584166444e-05,
    2.2384817268977202e-05, 5.164991905904898e-05,
    -0.0002901541729557643, 0.0002937134739788462, 0.0017556258587177365, -0.009746579530210003,
    0.028362277419360142, -0.05869339859199448, 0.09230432116029563, -0.10880393014164615,
    0.08227673849014899, 0.00358541548546268, -0.140240598585547, 1.2375126308378275,
)  # fmt: skip
_TANH = (
    -2.060276537636634e-05, 8.511313685577672e-05, -0.0002346347410887237, 0.0005889360520074057,
    -0.001455661830100716, 0.003592110378689024, -0.008863234397814355, 0.021869488493666944,
    -0.053968253967434016, 0.13333333333332714, -0.3333333333333333,
)  # fmt: skip
_SIN = (
    1.5916726193889336e-10, -2.5051112272573243e-08, 2.755731600817155e-06, -0.0001984126983657571,
    0.008333333333330827, -0.16666666666666666,
)  # fmt: skip
_COS = (
    -1.1381754653662937e-11, 2.0876134024090145e-09, -2.755731721268659e-07, 2.4801587298651292e-05,
    -0.0013888888888887322, 0.041666666666666664,
)  # fmt: skip


def _polynomial(x: str, coefficients: Sequence[float]) -> str:
    """Statements that leave a polynomial in ``x`` in ``p``, by Horner's rule."""
    first, *rest = coefficients
    lines = [f"double p = {first!r};"]
    lines += [f"p = __builtin_fma(p, {x}, {c!r});" for c in rest]
    return "\n  ".join(lines)


DOUBLES = f"""\
TR double as_double(int64_t x) {{ double y; __builtin_memcpy(&y, &x, 8); return y; }}
TR int64_t as_long(double x) {{ int64_t y; __builtin_memcpy(&y, &x, 8); return y; }}
// 2^n for a whole -1022 <= n <= 1023. Few processors have lanes of conversions to integers.
TR double two_to(double n) {{
  return as_double((int64_t)((uint64_t)as_long(n + {_ROUNDER + 1023!r}) << 52));
}}
// 2^n * x in two steps, so that denormals and overflow come out right
TR double scale(double x, double n) {{
  double half = __builtin_rint(n * 0.5);
  return x * two_to(half) * two_to(n - half);
}}
// exp(x) * 2^more, of numbers up to about 711
TR double exp_times(double x, double more) {{
  double y = x < -747.0 ? -747.0 : x;
  y = y > 711.0 ? 711.0 : y;
  double n = __builtin_rint(y * {_LN2_INVERSE!r});
  double r = __builtin_fma(n, {-_LN2_HIGH!r}, y);
  r = __builtin_fma(n, {-_LN2_LOW!r}, r);
  {_polynomial("r", [*_EXP, 1.0, 1.0])}
  return scale(p, n + more);
}}
TR double t_exp(double x) {{
  double v = exp_times(x, 0.0);
  return x > {_EXP_LAST!r} ? (double)INFINITY : v;
}}
TR double half_exp(double x) {{
  double v = exp_times(x, -1.0);
  return x > {_HALF_EXP_LAST!r} ? (double)INFINITY : v;
}}
TR double t_expm1(double x) {{
  double y = x < -40.0 ? -40.0 : x;
  y = y > 710.0 ? 710.0 : y;
  double n = __builtin_rint(y * {_LN2_INVERSE!r});
  double r = __builtin_fma(n, {-_LN2_HIGH!r}, y);
  r = __builtin_fma(n, {-_LN2_LOW!r}, r);
  {_polynomial("r", _EXP)}
  double q = __builtin_fma(p, r * r, r);
  double s = two_to(n - 1.0);  // half of 2^n, since 2^1024 is not a float64
  double e = __builtin_fma(s, q, s - 0.5);
  double v = n == 0.0 ? q : 2.0 * e;
  v = x > {_EXP_LAST!r} ? (double)INFINITY : v;
  return y == 0.0 ? x : v;
}}
// the exponent n of a positive x; f, where f - low is the logarithm of x / 2^n, about 0
TR double log_parts(double x, double& n, double& low) {{
  bool tiny = x < 2.2250738585072014e-308;
  double y = tiny ? x * 18014398509481984.0 : x;
  uint64_t b = (uint64_t)as_long(y);
  uint64_t e = (b - 0x3fe6a09e667f3bcdull + 0x3ff0000000000000ull) >> 52;
  n = as_double((int64_t)(e | 0x4330000000000000ull)) - 4503599627370496.0;
  n -= tiny ? 1077.0 : 1023.0;
  double f = as_double((int64_t)(b - (e << 52) + 0x3ff0000000000000ull)) - 1.0;
  double s = f / (2.0 + f);
  double z = s * s;
  {_polynomial("z", _LOG)}
  double h = 0.5 * f * f;
  low = h - s * (h + p * z);
  return f;
}}
TR double log_limits(double x, double v) {{
  v = x == (double)INFINITY ? x : v;
  v = x == 0.0 ? -(double)INFINITY : v;
  return x < 0.0 || x != x ? (double)NAN : v;
}}
TR double t_log(double x) {{
  double n, low;
  double f = log_parts(x, n, low);
  return log_limits(x, n * {_LN2_HIGH!r} - ((low - n * {_LN2_LOW!r}) - f));
}}
TR double t_log2(double x) {{
  double n, low;
  double f = log_parts(x, n, low);
  return log_limits(x, n + (f - low) * {_LN2_INVERSE!r});
}}
TR double t_log1p(double x) {{
  double u = 1.0 + x;
  double d = u - 1.0;
  double v = t_log(u) * (x / (d == 0.0 ? 1.0 : d));
  v = d == 0.0 ? x : v;
  return x == (double)INFINITY ? x : v;
}}
TR double t_sigmoid(double x) {{ return 1.0 / (1.0 + t_exp(-x)); }}
TR double t_tanh(double x) {{
  double a = __builtin_fabs(x);
  a = a > 20.0 ? 20.0 : a;
  double t = t_expm1(2.0 * a);
  double z = a * a;
  {_polynomial("z", _TANH)}
  double y = a < 0.55 ? a + a * (z * p) : t / (t + 2.0);
  return __builtin_copysign(y, x);
}}
// erfc(a) = exp(-a * a) * p(t) / (1 + 2 a) for a >= 0; of a * a the first part is exact
TR double erfc_above(double a) {{
  a = a > 30.0 ? 30.0 : a;
  double t = (a - 3.75) / (a + 3.75);
  {_polynomial("t", _ERFC)}
  double near = (double)(float)a;
  return t_exp(-near * near) * t_exp((near - a) * (near + a)) * p / (1.0 + 2.0 * a);
}}
// erf(x), |x| < 1
TR double erf_below(double x) {{
  double z = x * x;
  {_polynomial("z", _ERF)}
  return p * x;
}}
TR double t_erfc(double x) {{
  double a = __builtin_fabs(x), e = erfc_above(a);
  double far = x < 0.0 ? 2.0 - e : e, near = 1.0 - erf_below(x);
  return a < 0.5 ? near : far;
}}
TR float t_erfc(float x) {{ return (float)t_erfc((double)x); }}
TR double t_erf(double x) {{
  double a = __builtin_fabs(x), near = erf_below(a), far = 1.0 - erfc_above(a);
  return __builtin_copysign(a < 1.0 ? near : far, x);
}}
// sin(x), or cos(x) where turns is 1: x less the nearest multiple n of pi / 2, in three parts
TR double turned_sin(double x, double turns) {{
  double n = __builtin_rint(x * {2 / pi!r});
  double r = __builtin_fma(-n, {_HALF_PI[0]!r}, x);
  double m = n * {_HALF_PI[1]!r};
  double lost = __builtin_fma(n, {_HALF_PI[1]!r}, -m);
  double y = r - m;
  double back = y - r;
  double low = (r - (y - back)) - (m + back) - __builtin_fma(n, {_HALF_PI[2]!r}, lost);
  r = y + low;
  low = (y - r) + low;
  int64_t quarter = as_long(n + turns + {_ROUNDER!r});
  double z = r * r;
  double sine, cosine;
  {{
  {_polynomial("z", _SIN)}
  sine = r + (low + r * (z * p));
  }}
  {{
  {_polynomial("z", _COS)}
  double h = 0.5 * z, w = 1.0 - h;
  cosine = w + (((1.0 - w) - h) + (z * z * p - r * low));
  }}
  double v = as_double(as_long((quarter & 1) ? cosine : sine) ^ ((quarter & 2) << 62));
  return v;
}}
// by lanes from glibc: for arguments of which a float64 has no fraction, and floats
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define LANES extern "C" __attribute__((const, simd("notinbranch")))
LANES double lanes_sin(double) noexcept __asm__("sin");
LANES double lanes_cos(double) noexcept __asm__("cos");
TR float t_sin(float x) {{ return (float)lanes_sin((double)x); }}
TR float t_cos(float x) {{ return (float)lanes_cos((double)x); }}
#define FAR_SIN(x) lanes_sin(far ? x : 0.0)
#define FAR_COS(x) lanes_cos(far ? x : 0.0)
#else
TR float t_sin(float x) {{ return __builtin_sinf(x); }}
TR float t_cos(float x) {{ return __builtin_cosf(x); }}
#define FAR_SIN(x) (far ? __builtin_sin(x) : 0.0)
#define FAR_COS(x) (far ? __builtin_cos(x) : 0.0)
#endif
// a choice without a branch, into which a call would be moved
TR double chosen(bool first, double x, double y) {{
  int64_t mask = -(int64_t)first;
  return as_double((as_long(x) & mask) | (as_long(y) & ~mask));
}}
TR double t_sin(double x) {{
  bool far = !(__builtin_fabs(x) < 68719476736.0);
  double away = FAR_SIN(x), v = turned_sin(x, 0.0);
  v = x == 0.0 ? x : v;
  return chosen(far, away, v);
}}
TR double t_cos(double x) {{
  bool far = !(__builtin_fabs(x) < 68719476736.0);
  double away = FAR_COS(x), v = turned_sin(x, 1.0);
  return chosen(far, away, v);
}}
"""
"""Needs the first lines of the prelude; redefined float functions of it are computed in float64."""
