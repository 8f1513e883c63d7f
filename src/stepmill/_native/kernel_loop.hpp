// The kernel backend's side of the slab: commands go to the queue of the threads, faults become records.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "codec.hpp"
#include "kernel_envs.hpp"
#include "kernel_watch.hpp"
#include "overflow.hpp"
#include "tree.hpp"

namespace stepmill {

// Called by the pool's thread, with the GIL; it lets go of the GIL while it runs envs for longer than a moment.
class KernelLoop {
   public:
    KernelLoop(std::shared_ptr<Slab> slab, nb::dict settings);

    bool help(bool is_waiting);                        // as PoolState's helper: begins commands; to wait, runs envs or waits for one
    // A step of all envs that needs no commands: no env is at work, and all are alike. False: an env has a fault; the commands
    // are to be written, and finish_all() called.
    bool step_all(std::uint32_t slot);
    void finish_all();
    bool is_soon_done() const { return threads_->needed_ns(envs_->num_envs()) < LONG_NS; }
    void run_until(std::uint32_t local, std::uint32_t after_ticket);
    bool stop(double timeout_s);                       // false: a thread is still in an env, and is left behind
    nb::object state_of(std::uint32_t local);          // [state_bytes] uint8, a view
    nb::bytes snapshot(std::uint32_t local);
    void restore(std::uint32_t local, nb::bytes bytes);
    void clear() { envs_->clear(); }
    void release();
    int traverse(visitproc visit, void* arg) const;

   private:
    // From the constructor, if it is to let go of the GIL, to end() the pool's thread may be in envs: stop() of another thread waits.
    class WithoutGil {
       public:
        WithoutGil(KernelLoop& loop, bool is_wanted) : loop_(loop) {
            if (!is_wanted) return;
            loop_.is_in_envs_.store(1, std::memory_order_seq_cst);
            thread_ = PyEval_SaveThread();
        }
        ~WithoutGil() { end(); }
        WithoutGil(const WithoutGil&) = delete;
        WithoutGil& operator=(const WithoutGil&) = delete;

        void end() {
            if (thread_ == nullptr) return;
            PyEval_RestoreThread(std::exchange(thread_, nullptr));
            loop_.is_in_envs_.store(0, std::memory_order_seq_cst);
            if (loop_.is_stopping_.load(std::memory_order_seq_cst)) futex_wake_all(loop_.is_in_envs_);
        }

       private:
        KernelLoop& loop_;
        PyThreadState* thread_ = nullptr;
    };

    static constexpr std::uint64_t LONG_NS = 50'000'000;  // a step of all that takes longer has to look for signals in between

    bool begin();
    bool refuses_options(std::uint32_t local);
    void run_or_wait();
    void publish_faults(const std::vector<KernelFault>& faults);
    void publish_fault(std::uint32_t local, nb::handle record);

    std::shared_ptr<Slab> slab_;
    ServerWords words_;
    std::shared_ptr<KernelEnvs> envs_;
    std::unique_ptr<KernelThreads> threads_;
    std::unique_ptr<KernelWatch> watch_;        // null: no limit
    Word is_in_envs_{0};
    std::atomic<bool> is_stopping_{false};
    std::uint32_t num_seen_ = 0;                // of the finished, when help() last returned
    std::vector<std::uint32_t> taken_, fresh_;  // by env, the ticket last queued; scratch
    nb::object describe_, unpickler_;           // describe(is_reset, status, raised, message) -> record
    Encoder encoder_;
    OverflowWriter overflow_;
    std::vector<std::uint8_t> buffer_;
};

}  // namespace stepmill
