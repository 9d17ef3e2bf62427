"""Random numbers in C++: the stream of PyTorch's CPU generator, a block of words at a time.

The generator is the Mersenne Twister MT19937 (Matsumoto and Nishimura, ACM TOMACS 8(1), 1998):
624 words of state; a new block of words is computed from the last, and each word is tempered as
it is read. PyTorch draws one number of 64 bits, from two words, for each element of
``bernoulli``: the element is 1 where the low 53 bits are less than ``p * 2**53``. Both loops
over a block vectorise, which PyTorch's own does not.
"""

from treadle.codegen.cpp.prelude import PRELUDE
from treadle.runtime.kernels.rng import FUNCTION
from treadle.runtime.store.artifact import Source
from treadle.targets.cpu import CPP

_TEXT = r"""
namespace {
constexpr int WORDS = 624, AHEAD = 397, BEHIND = WORDS - AHEAD;

inline uint32_t mixed(uint32_t high, uint32_t low) {
  const uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
  return (y >> 1) ^ ((0u - (y & 1u)) & 0x9908b0dfu);
}

// The block after ``x``, which it replaces.
void advance(uint32_t* x) {
  alignas(64) uint32_t y[WORDS];
#pragma omp simd
  for (int k = 0; k < BEHIND; ++k) y[k] = x[k + AHEAD] ^ mixed(x[k], x[k + 1]);
#pragma omp simd safelen(64)
  for (int k = BEHIND; k < WORDS - 1; ++k) y[k] = y[k - BEHIND] ^ mixed(x[k], x[k + 1]);
  y[WORDS - 1] = y[AHEAD - 1] ^ mixed(x[WORDS - 1], y[0]);
  __builtin_memcpy(x, y, sizeof(y));
}

void temper(const uint32_t* x, uint32_t* out) {
#pragma omp simd
  for (int k = 0; k < WORDS; ++k) {
    uint32_t y = x[k];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    out[k] = y ^ (y >> 18);
  }
}

template <typename T>
void compare(const uint32_t* words, int64_t count, uint64_t below, T one, T* out) {
#pragma omp simd
  for (int64_t k = 0; k < count; ++k) {
    const uint64_t bits = ((uint64_t)(words[2 * k] & 0x1fffffu) << 32) | words[2 * k + 1];
    out[k] = bits < below ? one : (T)0;
  }
}

template <typename T>
void bernoulli(uint32_t* x, int64_t& at, int64_t n, uint64_t below, T one, T* out) {
  alignas(64) uint32_t words[WORDS];
  temper(x, words);
  int64_t done = 0;
  while (done < n) {
    if (at == WORDS) {
      advance(x);
      temper(x, words);
      at = 0;
    }
    const int64_t whole = n - done < (WORDS - at) / 2 ? n - done : (WORDS - at) / 2;
    compare(words + at, whole, below, one, out + done);
    at += 2 * whole;
    done += whole;
    if (done < n && at == WORDS - 1) {  // a number that two blocks share
      const uint32_t pair_high = words[at];
      advance(x);
      temper(x, words);
      const uint32_t pair[2] = {pair_high, words[0]};
      compare(pair, 1, below, one, out + done);
      at = 1;
      done += 1;
    }
  }
}
}  // namespace

"""

_ENTRY = f"""
// p: the generator's state, as words of 64 bits, and the result.
// sizes: elements, bytes of an element, its bits for 1, p * 2**53 rounded up, the next word.
extern "C" void {FUNCTION}(void* const* p, const int64_t* sizes, int64_t) {{
  uint64_t* state = (uint64_t*)p[0];
  alignas(64) uint32_t x[WORDS];
  for (int k = 0; k < WORDS; ++k) x[k] = (uint32_t)state[k];
  int64_t at = sizes[4];
  const int64_t n = sizes[0];
  const uint64_t below = (uint64_t)sizes[3];
  switch (sizes[1]) {{
    case 1: bernoulli<uint8_t>(x, at, n, below, (uint8_t)sizes[2], (uint8_t*)p[1]); break;
    case 2: bernoulli<uint16_t>(x, at, n, below, (uint16_t)sizes[2], (uint16_t*)p[1]); break;
    case 4: bernoulli<uint32_t>(x, at, n, below, (uint32_t)sizes[2], (uint32_t*)p[1]); break;
    default: bernoulli<uint64_t>(x, at, n, below, (uint64_t)sizes[2], (uint64_t*)p[1]);
  }}
  for (int k = 0; k < WORDS; ++k) state[k] = x[k];
  *(int64_t*)p[2] = at;
}}
"""

DRAWS = Source(CPP, "\n".join([PRELUDE, _TEXT, _ENTRY]), (FUNCTION,))
"""The translation unit that defines ``runtime.draws.FUNCTION``."""
