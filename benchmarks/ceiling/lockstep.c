/* Steps envs in lockstep and does nothing else: no engine can be faster with these envs, this learner and these waits.
 *
 *     lockstep WAIT CALLER SECONDS LEARNER_NS SHARES < durations
 *
 * WAIT is futex (threads sleep), yield (they yield their core until the word changes) or pinned (the same, each on a core of its own).
 * CALLER is 1 if the learner runs the first share of the envs itself. stdin has a line for each step: the nanoseconds of each share.
 * Prints the number of steps, and seconds. Work is a loop whose speed is measured first, so time without a core is not work.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_SHARES = 64, MAX_STEPS = 1 << 16, BLOCK = 1000000 };

// Words that different processes write are on different cache lines.
struct Shared {
    _Alignas(64) _Atomic uint32_t step;
    _Alignas(64) _Atomic uint32_t done;
    _Alignas(64) _Atomic uint32_t ready;
};

static double durations[MAX_STEPS][MAX_SHARES];
static double turns_per_ns;
static int sleeps, pins;

static double seconds_of(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void work(double ns) {
    for (uint64_t left = (uint64_t)(ns * turns_per_ns); left > 0; left--) __asm__ volatile("" ::: "memory");
}

static void calibrate(void) {
    turns_per_ns = 1.0;
    double best = 0;
    for (int i = 0; i < 20; i++) {
        double start = seconds_of(CLOCK_THREAD_CPUTIME_ID);
        work(BLOCK);
        double speed = BLOCK / (1e9 * (seconds_of(CLOCK_THREAD_CPUTIME_ID) - start));
        if (speed > best) best = speed;
    }
    turns_per_ns = best;
}

static void pin(int share) {
    cpu_set_t usable, own;
    CPU_ZERO(&own);
    sched_getaffinity(0, sizeof usable, &usable);
    int place = share % CPU_COUNT(&usable);
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &usable) && place-- == 0) CPU_SET(core, &own);
    if (pins) sched_setaffinity(0, sizeof own, &own);
}

// Waits until a word is no longer `old`.
static uint32_t wait_change(_Atomic uint32_t *word, uint32_t old) {
    uint32_t now;
    while ((now = atomic_load(word)) == old) {
        if (sleeps) syscall(SYS_futex, word, FUTEX_WAIT, old, NULL, NULL, 0);
        else sched_yield();
    }
    return now;
}

static void wake(_Atomic uint32_t *word) {
    if (sleeps) syscall(SYS_futex, word, FUTEX_WAKE, MAX_SHARES, NULL, NULL, 0);
}

static void run_worker(struct Shared *shared, int share, int num_steps, uint32_t num_workers) {
    pin(share);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (uint32_t step = 0;;) {
        step = wait_change(&shared->step, step);
        work(durations[step % (uint32_t)num_steps][share]);
        if (atomic_fetch_add(&shared->done, 1) + 1 != num_workers * step) continue;
        atomic_store(&shared->ready, step);
        wake(&shared->ready);
    }
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    sleeps = !strcmp(argv[1], "futex");
    pins = !strcmp(argv[1], "pinned");
    int caller = atoi(argv[2]), num_shares = atoi(argv[5]), num_steps = 0;
    double limit = atof(argv[3]), learner_ns = atof(argv[4]);
    uint32_t num_workers = (uint32_t)(num_shares - caller);
    while (num_steps < MAX_STEPS && scanf("%lf", &durations[num_steps][0]) == 1) {
        for (int share = 1; share < num_shares; share++)
            if (scanf("%lf", &durations[num_steps][share]) != 1) return 2;
        num_steps++;
    }
    struct Shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED || num_steps == 0 || num_shares > MAX_SHARES) return 2;
    calibrate();
    pid_t workers[MAX_SHARES];
    for (int share = caller; share < num_shares; share++)
        if ((workers[share] = fork()) == 0) run_worker(shared, share, num_steps, num_workers);
    pin(caller ? 0 : num_shares - 1);
    uint32_t step = 0;
    double start = seconds_of(CLOCK_MONOTONIC), now = start;
    for (; now - start < limit; now = seconds_of(CLOCK_MONOTONIC)) {
        atomic_store(&shared->step, ++step);
        wake(&shared->step);
        if (caller) work(durations[step % (uint32_t)num_steps][0]);
        if (num_workers > 0) wait_change(&shared->ready, step - 1);
        work(learner_ns);
    }
    printf("%u %.9f\n", step, now - start);
    for (int share = caller; share < num_shares; share++) kill(workers[share], SIGKILL), waitpid(workers[share], NULL, 0);
    return 0;
}
