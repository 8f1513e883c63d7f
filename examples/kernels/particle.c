/* A kernel in C: actions push a point on a line, and the reward is highest at zero.
 *
 *     cc -O2 -shared -fPIC -I$(python -c 'import stepmill; print(stepmill.get_include())') particle.c -o libparticle.so -lm
 */
#include <stdio.h>
#include <string.h>

#include "stepmill_kernel.h"

typedef struct {
    double place, speed;
    int64_t num_pushes;
} particle;

static void write_obs(const particle *self, float *obs) {
    obs[0] = (float)self->place;
    obs[1] = (float)self->speed;
}

static int32_t reset(void *state, stepmill_rng *rng, void *obs, stepmill_result *result) {
    particle *self = state;
    (void)result;
    self->place = stepmill_rng_uniform(rng, -1.0, 1.0);
    self->speed = 0.1 * stepmill_rng_normal(rng);
    self->num_pushes = 0;
    write_obs(self, obs);
    return STEPMILL_OK;
}

static int32_t step(void *state, const void *action, stepmill_rng *rng, void *obs, stepmill_result *result) {
    particle *self = state;
    const float force = *(const float *)action;
    (void)rng;
    if (!(force >= -1.0f && force <= 1.0f)) {
        snprintf(result->message, sizeof result->message, "a force of %g is not between -1 and 1", (double)force);
        return 1;
    }
    self->speed += 0.1 * force;
    self->place += 0.1 * self->speed;
    self->num_pushes += 1;
    result->reward = -fabs(self->place);
    result->terminated = fabs(self->place) > 2.0;
    write_obs(self, obs);
    return STEPMILL_OK;
}

static const double HIGHS[2] = {3.0, INFINITY}, LOWS[2] = {-3.0, -INFINITY};

const stepmill_kernel *stepmill_kernel_describe(void) {
    static const stepmill_kernel kernel = {
        .abi_version = STEPMILL_KERNEL_ABI,
        .size_bytes = sizeof(stepmill_kernel),
        .name = "particle",
        .observation = {.kind = STEPMILL_BOX, .dtype = "f4", .num_dims = 1, .shape = {2}, .lows = LOWS, .highs = HIGHS},
        .action = {.kind = STEPMILL_BOX, .dtype = "f4", .num_dims = 1, .shape = {1}, .low = -1.0, .high = 1.0},
        .state_bytes = sizeof(particle),
        .max_episode_steps = 200,
        .reset = reset,
        .step = step,
    };
    return &kernel;
}
