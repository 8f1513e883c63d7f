// Histograms of durations, and the sampler that decides which calls are timed.
#include <cstdint>

#include "check.hpp"
#include "shared/statistics.hpp"

using namespace stepmill;

namespace {

void every_duration_is_below_the_end_of_its_bucket_and_not_below_that_of_the_last() {
    for (std::uint64_t duration = 1; duration < std::uint64_t{1} << 38; duration += 1 + duration / 7) {
        const std::uint32_t bucket = bucket_of(duration);
        CHECK(duration < bucket_stop_ns(bucket));
        CHECK(bucket == 0 || duration >= bucket_stop_ns(bucket - 1));
    }
    CHECK(bucket_of(UINT64_MAX) == NUM_BUCKETS - 1);
}

void a_histogram_counts_calls_and_keeps_the_longest() {
    static TimeHistogram histogram{};
    histogram.add(1'000, 3, 3'000);
    histogram.add(5'000'000, 1, 5'000'000);
    histogram.add(2'000, 1, 2'000);
    CHECK(histogram.total_ns == 3'000 + 5'000'000 + 2'000);
    CHECK(histogram.max_ns == 5'000'000);
    CHECK(histogram.buckets[bucket_of(1'000)] == 3);
}

// Returns how many of `num_calls` calls of this length are timed; adds to `stood_for` how many calls these stand for.
std::uint32_t count_timed(std::uint64_t duration_ns, std::uint32_t num_calls, std::uint64_t& stood_for) {
    CallSampler sampler;
    std::uint32_t num_timed = 0;
    for (std::uint32_t i = 0; i < num_calls; ++i) {
        if (!sampler.is_due()) continue;
        ++num_timed;
        stood_for += sampler.next(duration_ns);
    }
    return num_timed;
}

void every_long_call_is_timed() {
    std::uint64_t stood_for = 0;
    CHECK(count_timed(20'000, 1'000, stood_for) == 1'000 && stood_for == 1'000);
}

void few_short_calls_are_timed_and_they_stand_for_all() {
    std::uint64_t stood_for = 0;
    const std::uint32_t num_timed = count_timed(100, 100'000, stood_for);
    CHECK(num_timed > 500 && num_timed < 1'500);
    CHECK(stood_for <= 100'000 && stood_for > 100'000 - 300);  // the calls after the last timed one are not counted yet
}

void the_gaps_match_no_period() {
    CallSampler sampler;
    std::uint32_t num_even = 0, num_timed = 0;
    for (std::uint32_t i = 0; i < 100'000; ++i) {
        if (!sampler.is_due()) continue;
        num_even += i % 2 == 0, ++num_timed;
        sampler.next(3'000);
    }
    CHECK(num_even > num_timed * 4 / 10 && num_even < num_timed * 6 / 10);
}

void one_call_that_was_held_up_does_not_claim_more_time_than_there_was() {
    UnclaimedTime unclaimed(1'000);
    CHECK(unclaimed.claim(300, 2'000) == 300);
    CHECK(unclaimed.claim(128 * 500, 2'500) == 1'200);
    CHECK(unclaimed.claim(100, 2'600) == 100);
    CHECK(unclaimed.claim(100, 2'600) == 0);
}

}  // namespace

int main() {
    return run_cases({
        {"every duration is below the end of its bucket, and not below that of the last", every_duration_is_below_the_end_of_its_bucket_and_not_below_that_of_the_last},
        {"a histogram counts calls and keeps the longest", a_histogram_counts_calls_and_keeps_the_longest},
        {"every long call is timed", every_long_call_is_timed},
        {"few short calls are timed, and they stand for all", few_short_calls_are_timed_and_they_stand_for_all},
        {"the gaps match no period", the_gaps_match_no_period},
        {"one call that was held up does not claim more time than there was", one_call_that_was_held_up_does_not_claim_more_time_than_there_was},
    });
}
