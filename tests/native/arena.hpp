// A slab with control words and one 8-byte observation per server, for tests without envs.
#pragma once

#include <memory>
#include <numeric>

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.hpp"
#include "shared/slab.hpp"

namespace stepmill {

inline SlabPlan plan_arena(std::uint32_t num_workers, std::uint32_t servers_per_worker, std::uint32_t num_slots) {
    SlabPlan plan;
    plan.num_slots = num_slots;
    plan.num_rows = num_workers * servers_per_worker;
    plan.shared_words = sizeof(PoolWords);
    std::size_t used = plan.shared_words + sizeof(SharedWords);
    plan.env_counters = used;
    used += sizeof(EnvCounters) * plan.num_rows;
    for (std::uint32_t worker = 0; worker < num_workers; ++worker) {
        plan.learner_words.push_back(used);
        used += learner_words_bytes(servers_per_worker);
        plan.worker_words.push_back(used);
        used += worker_words_bytes(servers_per_worker);
        plan.servers.emplace_back(servers_per_worker);
        std::iota(plan.servers.back().begin(), plan.servers.back().end(), worker * servers_per_worker);
    }
    constexpr std::size_t PAGE = 4096;
    used = (used + PAGE - 1) / PAGE * PAGE;
    const std::size_t stride = (plan.num_rows * sizeof(std::uint64_t) + PAGE - 1) / PAGE * PAGE;
    plan.observation.push_back(Column{.offset = used, .slot_stride = stride, .row_bytes = sizeof(std::uint64_t)});
    plan.size_bytes = used + num_slots * stride;
    return plan;
}

inline std::shared_ptr<Slab> make_slab(SlabPlan plan) {
    const int fd = memfd_create("stepmill-test", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(plan.size_bytes)) == 0);
    const int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    plan.place_rows();
    const ByteRange whole{0, plan.size_bytes};
    auto slab = std::make_shared<Slab>(fd, std::move(plan), std::vector<OwnedFd>(), std::vector<OwnedFd>(), OwnedFd(event), std::span(&whole, 1));
    close(fd);
    slab->format();
    return slab;
}

inline std::shared_ptr<Slab> make_arena(std::uint32_t num_workers, std::uint32_t servers_per_worker, std::uint32_t num_slots = 1) {
    return make_slab(plan_arena(num_workers, servers_per_worker, num_slots));
}

inline std::uint64_t& observation(Slab& slab, std::uint32_t server, std::uint32_t slot = 0) {
    return *reinterpret_cast<std::uint64_t*>(slab.base + slab.plan.observation[0].at(slot, server));
}

}  // namespace stepmill
