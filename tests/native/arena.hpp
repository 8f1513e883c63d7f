// A slab with control words and one 8-byte observation per server, for tests without envs.
#pragma once

#include <memory>
#include <numeric>

#include <sys/mman.h>
#include <unistd.h>

#include "check.hpp"
#include "slab.hpp"

namespace stepmill {

inline SlabPlan plan_arena(std::uint32_t num_workers, std::uint32_t servers_per_worker) {
    SlabPlan plan;
    plan.num_rows = num_workers * servers_per_worker;
    std::size_t used = sizeof(PoolControl);
    for (std::uint32_t worker = 0; worker < num_workers; ++worker) {
        plan.worker_control.push_back(used);
        plan.servers.emplace_back(servers_per_worker);
        std::iota(plan.servers.back().begin(), plan.servers.back().end(), worker * servers_per_worker);
        used += worker_control_bytes(servers_per_worker);
    }
    plan.observation.push_back(Column{used, 0, sizeof(std::uint64_t)});
    plan.size_bytes = used + align_line(plan.num_rows * sizeof(std::uint64_t));
    return plan;
}

inline std::shared_ptr<Slab> make_arena(std::uint32_t num_workers, std::uint32_t servers_per_worker) {
    SlabPlan plan = plan_arena(num_workers, servers_per_worker);
    const int fd = memfd_create("stepmill-test", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(plan.size_bytes)) == 0);
    auto slab = std::make_shared<Slab>(fd, std::move(plan), OwnFds(std::vector<int>{}), OwnFds(std::vector<int>{}));
    close(fd);
    slab->format();
    return slab;
}

inline std::uint64_t& observation(Slab& slab, std::uint32_t server) {
    return *reinterpret_cast<std::uint64_t*>(slab.base + slab.plan.observation[0].at(0, server));
}

}  // namespace stepmill
