// The OpenMP threads of the program, such as PyTorch's. After each parallel region they spin for some milliseconds (libgomp: 300,000 rounds),
// and hold cores which workers need while the program waits for these.
#pragma once

#include <cstdint>
#include <vector>

namespace stepmill {

class OpenMpThreads {
   public:
    explicit OpenMpThreads(std::uint32_t num_workers);

    // Before a wait that is probably as long as the last one: ends the threads of the calling thread's parallel regions, if they and the
    // workers are more than the cores. The next region starts as many, so that it computes the same bits. Needs no GIL.
    void end_idle(std::uint64_t last_wait_ns) noexcept;

   private:
    struct Runtime {
        int (*pause)(int kind);
        int (*max_threads)();
    };
    void find_runtimes() noexcept;

    std::uint32_t num_workers_, num_long_waits_ = 0, num_cores_ = 0;
    bool is_left_alone_;  // the user has decided how OpenMP's threads wait
    std::vector<Runtime> runtimes_;
};

}  // namespace stepmill
