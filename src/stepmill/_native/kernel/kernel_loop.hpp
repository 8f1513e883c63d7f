// The kernel backend's side of the slab: reads commands into the queue of the threads, and publishes faults as records.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pthread.h>

#include "codec/codec.hpp"
#include "codec/payload_writer.hpp"
#include "kernel/kernel_envs.hpp"
#include "shared/tree.hpp"

namespace stepmill {

// A thread that reports envs of a kernel that do not return. They cannot be ended, so that the program hangs. Knows no Python.
// Made and ended by the pool's thread.
class KernelWatch {
   public:
    // name: of the kernel. Each call of an env that takes `limit_ns` is reported once, by a line on stderr.
    KernelWatch(std::shared_ptr<const KernelEnvs> envs, std::string name, std::uint64_t limit_ns);
    ~KernelWatch();
    KernelWatch(const KernelWatch&) = delete;
    KernelWatch& operator=(const KernelWatch&) = delete;

    // The env_id of the env that was reported last, or NO_SERVER. For any thread.
    std::uint32_t last_reported() const noexcept { return last_reported_.load(std::memory_order_relaxed); }

   private:
    struct Seen {
        std::uint32_t env = NO_SERVER, num_begun = 0;
        std::uint64_t since_ns = 0;
        bool is_reported = false;
    };
    static void* run_thread(void* watch);
    void run() noexcept;
    void check(const KernelProgress& progress, Seen& seen, std::uint64_t now) noexcept;

    const std::shared_ptr<const KernelEnvs> envs_;
    const std::string name_;
    const std::uint64_t limit_ns_;
    std::vector<Seen> seen_;  // by thread of the kernel
    Word is_ended_{0};
    Word last_reported_{NO_SERVER};
    pthread_t thread_{};
    pid_t pid_;
};

// The memory of an env outside its state: OutsideMemory of spec/kernel.py, which describes its fields.
using OutsideFunction = void (*)(std::uintptr_t first, std::uintptr_t second, void* bytes, int kind);
using OutsideMemory = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, int, std::size_t, std::vector<std::pair<std::uintptr_t, std::size_t>>>;

// Called by the pool's thread, with the GIL. Releases the GIL while it runs envs, if that takes longer than GIL_NS or a setting says so.
class KernelLoop {
   public:
    KernelLoop(std::shared_ptr<Slab> slab, nb::dict settings);

    bool advance(bool is_waiting);                     // for PoolState::attach: begins commands; if is_waiting, runs envs or waits for one
    // Steps all envs without commands. All must be idle and write to the same slot. False: an env has a fault; the caller must then write
    // the commands and call finish_all().
    bool step_all(std::uint32_t slot);
    void finish_all();                                 // publishes the results and faults of the last step_all()
    bool is_soon_done() const { return threads_->needed_ns(envs_->num_envs()) < LONG_NS; }
    void run_until(std::uint32_t local, std::uint32_t after_ticket);
    bool stop(double timeout_s);                       // false: a thread is still in an env; it is not joined
    nb::object last_reported() const;                  // env_id of the env that KernelWatch reported last, or None. For any thread with the GIL
    nb::object state_of(std::uint32_t local);          // [state_bytes] uint8, a view
    void set_outside(nb::list outside);                // by env: the memory outside its state, or None
    nb::tuple save(std::uint32_t local);               // (memory, memory outside the state or None)
    void check_saved(const nb::object& saved) const;   // throws invalid_argument if restore() cannot take it
    void restore(std::uint32_t local, const nb::object& saved);
    void release();
    int traverse(visitproc visit, void* arg) const;

   private:
    // Releases the GIL until end(), if `is_wanted`. The pool's thread may run envs meanwhile, so stop() of another thread waits for end().
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

    static constexpr std::uint64_t LONG_NS = 50'000'000;  // a longer step must check for signals, which step_all() does not

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
    std::uint32_t num_seen_ = 0;                // num_finished() when advance() last returned
    std::vector<std::uint32_t> queued_tickets_;  // by env: the ticket of the command queued last
    std::vector<std::uint32_t> new_envs_;        // scratch of begin(): the envs to queue
    nb::list outside_;                          // by env: a KernelEnvMemory of spec/kernel.py, or None
    std::vector<OutsideMemory> outside_memory_;  // what these have described
    nb::object describe_, unpickler_;           // describe(is_reset, status, raised, message) -> record
    Encoder encoder_;
    PayloadWriter payloads_;
    bool always_releases_gil_;                 // also for short work: other threads of the process answer while an env hangs
    std::vector<std::uint8_t> buffer_;
};

}  // namespace stepmill
