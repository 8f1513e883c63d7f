/* The C interface of kernels: environments in compiled code, which stepmill's own threads run without Python.
 *
 * A library defines one function, stepmill_kernel_describe(). stepmill.kernels.load("libmyenv.so") calls it once, and
 * stepmill.Pool([kernel] * n, backend="kernel") runs n envs of it. `stepmill.get_include()` is the directory of this file.
 *
 *     memory of one env, all of it stepmill's:
 *
 *     rng     | s[0] | s[1] | s[2] | s[3] |        the env's own generator: results do not depend on threads
 *     state   | state_bytes, zero at first |       what the env remembers; begins on a multiple of 64 bytes
 *     obs     | one row of the observation |       write all of it: it lies in the batch, and holds anything before
 *     action  | one row of the action      |       read only
 *     result  | reward | terminated | truncated | message |
 *
 * One env is never in two calls at once. Two envs are, in different threads: a kernel must not write global variables.
 * reset() and step() return STEPMILL_OK. Any other number is a fault of this env alone: the user gets an EnvError with
 * result->message, and the env is reset before it is stepped again. They must return, not throw: nobody can end them.
 */
#ifndef STEPMILL_KERNEL_H
#define STEPMILL_KERNEL_H

#include <math.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STEPMILL_KERNEL_ABI 1u /* load() refuses a library that was compiled for another number */
#define STEPMILL_OK 0
#define STEPMILL_MAX_DIMS 6
#define STEPMILL_MESSAGE_BYTES 112

typedef struct stepmill_rng {
    uint64_t s[4];
} stepmill_rng;

/* When reset() or step() is called the reward is 0, no flag is set, and the message is empty. */
typedef struct stepmill_result {
    double reward;
    uint8_t terminated;
    uint8_t truncated;
    char message[STEPMILL_MESSAGE_BYTES]; /* of a fault: a text that ends with a zero byte */
} stepmill_result;

enum { STEPMILL_BOX = 0, STEPMILL_DISCRETE = 1 };

typedef struct stepmill_space {
    int32_t kind;       /* STEPMILL_BOX or STEPMILL_DISCRETE */
    const char *dtype;  /* of a Box, as NumPy names it: "f4", "f8", "u1", "i4", ...; a Discrete row is one int64_t */
    int32_t num_dims;
    int64_t shape[STEPMILL_MAX_DIMS];
    double low, high;           /* bounds of every element of a Box */
    const double *lows, *highs; /* or one bound per element; NULL: low and high */
    int64_t n, start;           /* of a Discrete: its values are start ... start + n - 1 */
} stepmill_space;

typedef struct stepmill_kernel {
    uint32_t abi_version;      /* STEPMILL_KERNEL_ABI */
    uint32_t size_bytes;       /* sizeof(stepmill_kernel) */
    const char *name;
    stepmill_space observation;
    stepmill_space action;
    uint64_t state_bytes;
    int64_t max_episode_steps; /* after this many steps the episode is truncated; 0: no limit */

    int32_t (*reset)(void *state, stepmill_rng *rng, void *obs, stepmill_result *result);
    int32_t (*step)(void *state, const void *action, stepmill_rng *rng, void *obs, stepmill_result *result);
} stepmill_kernel;

/* Defined by the library. What it returns lives as long as the library is loaded. */
const stepmill_kernel *stepmill_kernel_describe(void);

/* ---- random numbers: xoshiro256++ 1.0 of Blackman and Vigna, seeded by splitmix64 ----------------------------------
 * stepmill seeds the generator when a reset has a seed; else it goes on. Kernels in Python draw the same numbers. */

static inline void stepmill_rng_seed(stepmill_rng *rng, uint64_t seed) {
    for (int i = 0; i < 4; ++i) {
        uint64_t z = (seed += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        rng->s[i] = z ^ (z >> 31);
    }
}

/* 64 random bits. */
static inline uint64_t stepmill_rng_bits(stepmill_rng *rng) {
    uint64_t *s = rng->s;
    const uint64_t sum = s[0] + s[3];
    const uint64_t result = ((sum << 23) | (sum >> 41)) + s[0];
    const uint64_t t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = (s[3] << 45) | (s[3] >> 19);
    return result;
}

/* Uniform in [0, 1), 53 bits. */
static inline double stepmill_rng_random(stepmill_rng *rng) {
    return (double)(stepmill_rng_bits(rng) >> 11) * 0x1.0p-53;
}

/* Uniform in [low, high). */
static inline double stepmill_rng_uniform(stepmill_rng *rng, double low, double high) {
    return low + (high - low) * stepmill_rng_random(rng);
}

/* Uniform among low ... high - 1; high must be more than low. Bits beyond the range are drawn again, so that none is favoured. */
static inline int64_t stepmill_rng_integers(stepmill_rng *rng, int64_t low, int64_t high) {
    const uint64_t largest = (uint64_t)high - (uint64_t)low - 1;
    uint64_t mask = largest;
    for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
    for (;;) {
        const uint64_t value = stepmill_rng_bits(rng) & mask;
        if (value <= largest) return (int64_t)((uint64_t)low + value);
    }
}

/* Standard normal, by Marsaglia's polar method; the second number of a pair is not kept. */
static inline double stepmill_rng_normal(stepmill_rng *rng) {
    for (;;) {
        const double u = 2.0 * stepmill_rng_random(rng) - 1.0;
        const double v = 2.0 * stepmill_rng_random(rng) - 1.0;
        const double s = u * u + v * v;
        if (s < 1.0 && s > 0.0) return u * sqrt(-2.0 * log(s) / s);
    }
}

#ifdef __cplusplus
}
#endif

#endif
