// Row states, doorbells and counts, with threads as workers: wherever a worker dies, the learner is woken.
#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "engine.hpp"

using namespace stepmill;

namespace {

constexpr std::uint32_t NUM_WORKERS = 3, SERVERS_PER_WORKER = 4, NUM_SERVERS = NUM_WORKERS * SERVERS_PER_WORKER;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int NUM_ROUNDS = 3'000;
#else
constexpr int NUM_ROUNDS = 20'000;
#endif

std::vector<std::uint32_t> all_servers() {
    std::vector<std::uint32_t> servers(NUM_SERVERS);
    std::iota(servers.begin(), servers.end(), 0u);
    return servers;
}

std::shared_ptr<Slab> make_slab(std::int32_t max_spinners) {
    auto slab = make_arena(NUM_WORKERS, SERVERS_PER_WORKER);
    slab->pool->own.max_spinners.store(max_spinners);
    return slab;
}

void a_late_owner_loses_an_aborted_command() {
    Word state{0};
    CHECK(start_command(state, 1) && state.load() == state_word(1, Phase::RUNNING));
    CHECK(claim_result(state, 1) && !claim_result(state, 1));
    CHECK(start_command(state, 2));
    state.store(state_word(2, Phase::ABORTED));
    CHECK(!claim_result(state, 2));
    state.store(state_word(3, Phase::ABORTED));
    CHECK(!start_command(state, 3) && start_command(state, 4));
}

void a_ticket_may_wrap_around() {
    Word state{0};
    for (const std::uint32_t ticket : {0x3ffffffeu, 0x3fffffffu, 0x40000000u, 0x40000001u, 0xffffffffu, 0u, 1u}) {
        CHECK(start_command(state, ticket) && claim_result(state, ticket));
        CHECK(state_ticket(state.load()) == ticket_part(ticket) && state_phase(state.load()) == Phase::PUBLISHING);
    }
}

void only_the_parent_uses_the_parents_bit_of_the_spinners() {
    for (std::uint32_t worker = 0; worker < 200; ++worker) CHECK(spin_bit(worker) != spin_bit(PARENT));
    const auto slab = make_slab(2);
    CHECK(acquire_spin(*slab->pool, PARENT) && acquire_spin(*slab->pool, 63));
    release_spin(*slab->pool, 63);
    CHECK(slab->pool->shared.spinners.load() == spin_bit(PARENT));
}

// The reaper may read a command that was outstanding a moment before, while the pool writes the next one.
void a_command_may_be_read_while_the_next_is_written() {
    const auto slab = make_arena(1, 1);
    const ServerWords& words = slab->words[0];
    set_command(words, 0, Command::STEP);
    std::atomic<bool> is_over{false};
    std::thread reader([&] {
        while (!is_over.load()) {
            const Command command = get_command(words, 0);
            CHECK(command == Command::STEP || command == Command::RESET);
        }
    });
    for (int round = 0; round < NUM_ROUNDS; ++round) {
        set_command(words, 0, round % 2 == 0 ? Command::RESET : Command::STEP);
        words.ticket[0].fetch_add(1);
    }
    is_over.store(true);
    reader.join();
}

// Each command goes to exactly one of owner and reaper.
void owner_and_reaper_never_both_get_a_command() {
    const auto slab = make_arena(1, 1);
    ServerWords& words = slab->words[0];
    slab->workers[0]->learner.dead.store(static_cast<std::uint32_t>(Death::OVERDUE));  // it may still run, so its results must not be aborted while it publishes
    std::atomic<std::uint32_t> go{0}, finished{0}, num_owned{0};
    std::thread owner([&] {
        for (std::uint32_t ticket = 1; ticket <= static_cast<std::uint32_t>(NUM_ROUNDS); ++ticket) {
            while (go.load(std::memory_order_acquire) < ticket) cpu_pause();
            if (start_command(words.state[0], ticket) && claim_result(words.state[0], ticket)) {
                observation(*slab, 0) = answer(0, ticket);
                words.fault[0].store(0, std::memory_order_relaxed);
                words.done[0].store(ticket, std::memory_order_release);
                num_owned.fetch_add(1);
            }
            finished.store(ticket, std::memory_order_release);
        }
    });
    std::uint32_t num_aborted = 0;
    for (std::uint32_t ticket = 1; ticket <= static_cast<std::uint32_t>(NUM_ROUNDS); ++ticket) {
        words.ticket[0].store(ticket, std::memory_order_seq_cst);
        go.store(ticket, std::memory_order_release);
        const std::uint32_t settled = abort_commands(*slab, 0, Fault::NEIGHBOUR);
        num_aborted += settled;
        while (finished.load(std::memory_order_acquire) < ticket) cpu_pause();
        CHECK(words.done[0].load(std::memory_order_acquire) == ticket);
        CHECK((words.fault[0].load() != 0) == (settled == 1));
        if (settled == 0) CHECK(observation(*slab, 0) == answer(0, ticket));
    }
    owner.join();
    CHECK(num_aborted + num_owned.load() == static_cast<std::uint32_t>(NUM_ROUNDS));
    CHECK(slab->pool->shared.count.load() == num_aborted);
}

void lose_no_wake_up(Waiting waiting) {
    for (const std::int32_t max_spinners : {0, 1, 4}) {
        const auto slab = make_slab(max_spinners);
        std::vector<std::unique_ptr<WorkerThread>> workers;
        for (std::uint32_t worker = 0; worker < NUM_WORKERS; ++worker) workers.push_back(std::make_unique<WorkerThread>(*slab, worker, DeathPoint::NONE, 1));
        Parent parent(*slab, waiting);
        std::minstd_rand random(11);
        std::vector<std::uint32_t> servers = all_servers(), pending;
        std::uint32_t num_commands = 0;
        for (int round = 0; round < NUM_ROUNDS / 2; ++round) {
            std::vector<std::uint32_t> idle;
            for (const std::uint32_t server : servers) {
                if (std::find(pending.begin(), pending.end(), server) == pending.end()) idle.push_back(server);
            }
            std::shuffle(idle.begin(), idle.end(), random);
            idle.resize(idle.empty() ? 0 : random() % idle.size() + 1);
            parent.command(idle);
            num_commands += static_cast<std::uint32_t>(idle.size());
            pending.insert(pending.end(), idle.begin(), idle.end());
            parent.wait(pending, static_cast<std::uint32_t>(random() % pending.size()) + 1);
            std::erase_if(pending, [&](std::uint32_t server) {
                if (!parent.is_done(server)) return false;
                CHECK(parent.fault(server) == Fault::NONE);
                parent.check(server);
                return true;
            });
        }
        parent.wait(pending, static_cast<std::uint32_t>(pending.size()));
        parent.stop_workers();
        workers.clear();
        CHECK(slab->pool->shared.count.load() == num_commands);
        CHECK(slab->pool->shared.spinners.load() == 0);
    }
}

void no_wake_up_is_lost_and_the_count_is_right() { lose_no_wake_up(Waiting::PARKS); }
void no_event_is_lost_of_a_learner_that_watches() { lose_no_wake_up(Waiting::WATCHES); }

// Marks workers dead whose thread has ended, from a thread of its own, as the reaper does with a pidfd.
class Undertaker {
   public:
    Undertaker(Reaper& reaper, std::vector<std::unique_ptr<WorkerThread>>& workers)
        : reaper_(reaper), workers_(workers), is_buried_(workers.size()), thread_([this] { run(); }) {}
    ~Undertaker() {
        is_over_.store(true);
        thread_.join();
    }

    bool is_buried(std::uint32_t worker) const { return is_buried_[worker].load(std::memory_order_acquire); }
    void revived(std::uint32_t worker) { is_buried_[worker].store(false, std::memory_order_release); }

   private:
    void run() {
        while (!is_over_.load()) {
            for (std::uint32_t worker = 0; worker < workers_.size(); ++worker) {
                if (is_buried(worker) || !workers_[worker]->has_died()) continue;
                reaper_.declare_dead(worker);
                is_buried_[worker].store(true, std::memory_order_release);
            }
            std::this_thread::yield();
        }
    }

    Reaper& reaper_;
    std::vector<std::unique_ptr<WorkerThread>>& workers_;
    std::vector<std::atomic<bool>> is_buried_;
    std::atomic<bool> is_over_{false};
    std::thread thread_;
};

void die_and_be_revived(DeathPoint death) {
    const auto slab = make_slab(2);
    Reaper reaper(slab, Limits{});
    std::vector<std::unique_ptr<WorkerThread>> workers(NUM_WORKERS);
    auto start = [&](std::uint32_t worker, unsigned chance) {
        reaper.watch(worker, Reaper::NO_PIDFD);
        workers[worker] = std::make_unique<WorkerThread>(*slab, worker, death, chance);
    };
    for (std::uint32_t worker = 0; worker < NUM_WORKERS; ++worker) start(worker, 20 + worker);
    Parent parent(*slab);
    std::uint32_t num_revived = 0;
    {
        Undertaker undertaker(reaper, workers);
        const std::vector<std::uint32_t> servers = all_servers();
        for (int round = 0; round < NUM_ROUNDS / 20; ++round) {
            parent.command(servers);
            parent.wait(servers, NUM_SERVERS);
            for (const std::uint32_t server : servers) parent.check(server);
            for (std::uint32_t worker = 0; worker < NUM_WORKERS; ++worker) {
                if (!undertaker.is_buried(worker)) continue;
                start(worker, 20 + num_revived % 50);
                undertaker.revived(worker);
                ++num_revived;
            }
        }
    }
    parent.stop_workers();
    for (std::uint32_t worker = 0; worker < NUM_WORKERS; ++worker) {
        workers[worker].reset();
        reaper.declare_dead(worker);
    }
    CHECK(num_revived > 0);
    CHECK(slab->pool->shared.spinners.load() == 0);
}

void the_commands_of_a_worker_that_dies_idle_become_faults() { die_and_be_revived(DeathPoint::IDLE); }
void the_commands_of_a_worker_that_dies_in_an_env_become_faults() { die_and_be_revived(DeathPoint::TAKEN); }
void the_commands_of_a_worker_that_dies_while_it_writes_become_faults() { die_and_be_revived(DeathPoint::CLAIMED); }
void results_that_a_dead_worker_never_counted_are_found() { die_and_be_revived(DeathPoint::DONE); }
void the_commands_of_a_worker_that_dies_after_counting_become_faults() { die_and_be_revived(DeathPoint::COUNTED); }
void the_permit_of_a_spinner_that_dies_is_returned() { die_and_be_revived(DeathPoint::SPINNING); }

void no_more_threads_spin_than_permitted() {
    const auto slab = make_slab(2);
    std::atomic<int> num_inside{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            for (int i = 0; i < NUM_ROUNDS; ++i) {
                if (!acquire_spin(*slab->pool, static_cast<std::uint32_t>(t))) continue;
                CHECK(num_inside.fetch_add(1) < 2);
                num_inside.fetch_sub(1);
                release_spin(*slab->pool, static_cast<std::uint32_t>(t));
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(slab->pool->shared.spinners.load() == 0);
}

void only_a_thread_that_waited_briefly_spins() {
    constexpr std::uint64_t SPIN_NS = 200'000;
    SpinPolicy spin_policy;
    CHECK(!spin_policy.may_spin(0, 1));
    CHECK(spin_policy.may_spin(SPIN_NS, 1));
    spin_policy.record_wait(SPIN_NS, 0, SPIN_NS, 2);
    CHECK(!spin_policy.may_spin(SPIN_NS, 3));
    spin_policy.record_wait(SPIN_NS - 1, 0, SPIN_NS, 4);
    CHECK(spin_policy.may_spin(SPIN_NS, 5));
}

void a_thread_that_lost_the_core_to_another_program_parks_for_a_while() {
    constexpr std::uint64_t SPIN_NS = 200'000, MS = 1'000'000;
    SpinPolicy spin_policy;
    spin_policy.record_wait(3 * MS, 3 * MS, SPIN_NS, 10 * MS);
    spin_policy.record_wait(1, 0, SPIN_NS, 11 * MS);
    CHECK(!spin_policy.may_spin(SPIN_NS, 12 * MS));
    CHECK(!spin_policy.may_spin(SPIN_NS, 200 * MS));
    CHECK(spin_policy.may_spin(SPIN_NS, 203 * MS));
    spin_policy.record_wait(1, SPIN_NS, SPIN_NS, 204 * MS);  // the loss is due to an env of the pool
    CHECK(spin_policy.may_spin(SPIN_NS, 205 * MS));
}

void the_parent_is_rung_when_the_count_wraps() {
    const auto slab = make_arena(1, 1);
    PoolControl& pool = *slab->pool;
    pool.shared.count.store(0xfffffffeu);
    pool.own.ring_at.store(1);
    const std::uint32_t seen = pool.shared.bell.load();
    count_results(pool, 2);
    CHECK(pool.shared.bell.load() == seen);
    count_results(pool, 3);  // skips 1
    CHECK(pool.shared.bell.load() == seen + 1);
    count_results(pool, 1);
    CHECK(pool.shared.bell.load() == seen + 1);
}

}  // namespace

int main() {
    return run_cases({
        {"a late owner loses an aborted command", a_late_owner_loses_an_aborted_command},
        {"a ticket may wrap around", a_ticket_may_wrap_around},
        {"only the parent uses the parents bit of the spinners", only_the_parent_uses_the_parents_bit_of_the_spinners},
        {"a command may be read while the next is written", a_command_may_be_read_while_the_next_is_written},
        {"the parent is rung when the count wraps", the_parent_is_rung_when_the_count_wraps},
        {"no more threads spin than permitted", no_more_threads_spin_than_permitted},
        {"only a thread that waited briefly spins", only_a_thread_that_waited_briefly_spins},
        {"a thread that lost the core to another program parks for a while", a_thread_that_lost_the_core_to_another_program_parks_for_a_while},
        {"owner and reaper never both get a command", owner_and_reaper_never_both_get_a_command},
        {"no wake-up is lost and the count is right", no_wake_up_is_lost_and_the_count_is_right},
        {"no event is lost of a learner that watches", no_event_is_lost_of_a_learner_that_watches},
        {"the commands of a worker that dies idle become faults", the_commands_of_a_worker_that_dies_idle_become_faults},
        {"the commands of a worker that dies in an env become faults", the_commands_of_a_worker_that_dies_in_an_env_become_faults},
        {"the commands of a worker that dies while it writes become faults", the_commands_of_a_worker_that_dies_while_it_writes_become_faults},
        {"results that a dead worker never counted are found", results_that_a_dead_worker_never_counted_are_found},
        {"the commands of a worker that dies after counting become faults", the_commands_of_a_worker_that_dies_after_counting_become_faults},
        {"the permit of a spinner that dies is returned", the_permit_of_a_spinner_that_dies_is_returned},
    });
}
