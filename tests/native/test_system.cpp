// Usable cores from what /proc says, and the watcher of the learner.
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <csignal>
#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "shared/cores.hpp"
#include "shared/pidfd.hpp"
#include "shared/learner_watch.hpp"

using namespace stepmill;

namespace {

// A directory that replaces the root of a machine.
class Machine {
   public:
    Machine() {
        char name[] = "/tmp/stepmill-test-XXXXXX";
        CHECK(mkdtemp(name) != nullptr);
        root = name;
    }
    ~Machine() { std::filesystem::remove_all(root); }
    Machine(const Machine&) = delete;
    Machine& operator=(const Machine&) = delete;

    void file(const std::string& path, const std::string& text) const {
        std::filesystem::create_directories(std::filesystem::path(root + path).parent_path());
        std::ofstream(root + path) << text;
    }

    std::string root;
};

constexpr const char* MOUNT_V2 = "30 20 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
constexpr const char* MOUNT_V1 =
    "31 20 0:27 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "32 20 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n";

void a_machine_without_cgroups_has_no_quota() {
    const Machine machine;
    CHECK(quota_cores(machine.root) == 0);
    machine.file("/proc/self/cgroup", "garbage\n:::\n0::\n");
    machine.file("/proc/self/mountinfo", "garbage\n - \n1 2 - cgroup2\n");
    CHECK(quota_cores(machine.root) == 0);
}

void the_least_quota_of_all_groups_above_counts() {
    const Machine machine;
    machine.file("/proc/self/cgroup", "0::/user/job/step\n");
    machine.file("/proc/self/mountinfo", MOUNT_V2);
    machine.file("/sys/fs/cgroup/user/job/step/cpu.max", "max 100000\n");
    CHECK(quota_cores(machine.root) == 0);
    machine.file("/sys/fs/cgroup/user/job/cpu.max", "250000 100000\n");
    CHECK(quota_cores(machine.root) == 3);
    machine.file("/sys/fs/cgroup/user/cpu.max", "20000 100000\n");
    CHECK(quota_cores(machine.root) == 1);
}

void a_container_that_sees_its_own_group_as_the_root_has_its_quota() {
    const Machine machine;
    machine.file("/proc/self/cgroup", "0::/\n");
    machine.file("/proc/self/mountinfo", MOUNT_V2);
    machine.file("/sys/fs/cgroup/cpu.max", "400000 100000\n");
    CHECK(quota_cores(machine.root) == 4);
}

void a_container_whose_group_is_named_from_the_top_has_its_quota() {
    const Machine machine;
    machine.file("/proc/self/cgroup", "4:cpu,cpuacct:/docker/abc\n3:cpuset:/docker/abc\n");
    machine.file("/proc/self/mountinfo", "32 20 0:28 /docker/abc /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n");
    machine.file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n");
    machine.file("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    CHECK(quota_cores(machine.root) == 2);
}

void version_1_says_no_limit_by_a_negative_quota() {
    const Machine machine;
    machine.file("/proc/self/cgroup", "4:cpu,cpuacct:/job\n3:cpuset:/job\n0::/\n");
    machine.file("/proc/self/mountinfo", MOUNT_V1);
    machine.file("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n");
    machine.file("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
    CHECK(quota_cores(machine.root) == 0);
    machine.file("/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "800000\n");
    CHECK(quota_cores(machine.root) == 8);
}

void yields_are_fair_since_linux_6_6() {
    for (const char* release : {"6.6", "6.6.0-rc1", "6.18.44-custom", "7.0.1-amd64"}) CHECK(yields_fairly(release));
    for (const char* release : {"6.5.13-generic", "5.15.0", "4.4.0", "", "unknown"}) CHECK(!yields_fairly(release));
}

void this_machine_has_a_usable_core() { CHECK(usable_cores() >= 1); }

void a_worker_ends_with_its_learner() {
    const pid_t learner = fork();
    if (learner == 0) {
        pause();
        _exit(0);
    }
    const int pidfd = open_pidfd(learner);
    CHECK(pidfd >= 0);
    const pid_t worker = fork();
    if (worker == 0) {
        if (watch_parent(pidfd) != 0) _exit(1);
        close(pidfd);  // the watcher has a duplicate
        for (;;) pause();
    }
    CHECK(signal_pidfd(pidfd, SIGKILL) == 0);
    int status = 0;
    CHECK(waitpid(worker, &status, 0) == worker);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_LEARNER_GONE);
    CHECK(waitpid(learner, &status, 0) == learner);
    CHECK(signal_pidfd(pidfd, SIGKILL) == ESRCH);
    close(pidfd);
}

void a_descriptor_that_is_none_is_refused() { CHECK(watch_parent(-1) == EBADF); }

}  // namespace

int main() {
    return run_cases({
        {"a machine without cgroups has no quota", a_machine_without_cgroups_has_no_quota},
        {"the least quota of all groups above counts", the_least_quota_of_all_groups_above_counts},
        {"a container that sees its own group as the root has its quota", a_container_that_sees_its_own_group_as_the_root_has_its_quota},
        {"a container whose group is named from the top has its quota", a_container_whose_group_is_named_from_the_top_has_its_quota},
        {"version 1 says no limit by a negative quota", version_1_says_no_limit_by_a_negative_quota},
        {"yields are fair since Linux 6.6", yields_are_fair_since_linux_6_6},
        {"this machine has a usable core", this_machine_has_a_usable_core},
        {"a worker ends with its learner", a_worker_ends_with_its_learner},
        {"a descriptor that is none is refused", a_descriptor_that_is_none_is_refused},
    });
}
