#include "shared/cores.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

namespace stepmill {

namespace {

constexpr std::size_t MAX_CPUS = 1 << 16;

int affinity_cores() {
    // The kernel refuses a mask that is smaller than its count of CPUs: try larger masks.
    for (std::size_t num_cpus = 1024; num_cpus <= MAX_CPUS; num_cpus *= 2) {
        const std::size_t size_bytes = CPU_ALLOC_SIZE(num_cpus);
        std::vector<unsigned long> mask(size_bytes / sizeof(unsigned long) + 1);
        auto* set = reinterpret_cast<cpu_set_t*>(mask.data());
        if (sched_getaffinity(0, size_bytes, set) == 0) return CPU_COUNT_S(size_bytes, set);
    }
    return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

// Where a cgroup hierarchy is mounted: the group `root` is visible at `point`.
struct Mount {
    std::string root;
    std::string point;
};

struct Hierarchies {
    std::optional<Mount> unified;  // v2
    std::optional<Mount> cpu;      // v1, with the controller "cpu"
};

bool has_word(std::string_view list, std::string_view word) {
    while (!list.empty()) {
        const std::size_t comma = std::min(list.find(','), list.size());
        if (list.substr(0, comma) == word) return true;
        list.remove_prefix(std::min(comma + 1, list.size()));
    }
    return false;
}

// A line of mountinfo: id parent major:minor root point options [tags] - type source options.
Hierarchies find_hierarchies(const std::string& root) {
    Hierarchies found;
    std::ifstream file(root + "/proc/self/mountinfo");
    for (std::string line; std::getline(file, line);) {
        const std::size_t dash = line.find(" - ");
        if (dash == std::string::npos) continue;
        std::istringstream head(line.substr(0, dash)), tail(line.substr(dash + 3));
        std::string skipped, type, options;
        Mount mount;
        head >> skipped >> skipped >> skipped >> mount.root >> mount.point;
        tail >> type >> skipped >> options;
        if (type == "cgroup2") found.unified = mount;
        if (type == "cgroup" && has_word(options, "cpu")) found.cpu = mount;
    }
    return found;
}

// Returns the directories of the group and of its visible ancestors, lowest first.
std::vector<std::string> directories_of(const Mount& mount, const std::string& group) {
    std::string below = group;
    // In a container the mount may show only a part of the hierarchy, while `group` is named from the top.
    if (mount.root != "/" && below.rfind(mount.root, 0) == 0) below.erase(0, mount.root.size());
    if (below.rfind("/..", 0) == 0 || below.rfind('/', 0) != 0) below.clear();
    std::vector<std::string> directories;
    while (!below.empty() && below != "/") {
        directories.push_back(mount.point + below);
        below.erase(below.rfind('/'));
    }
    directories.push_back(mount.point);
    return directories;
}

// Reads the number of cores from cpu.max ("max 100000" or "150000 100000"), or from the two files of v1 (quota -1: no limit).
std::optional<double> read_quota(const std::string& directory, bool is_unified) {
    double quota_us = 0.0, period_us = 0.0;
    if (is_unified) {
        std::ifstream file(directory + "/cpu.max");
        if (!(file >> quota_us >> period_us)) return std::nullopt;
    } else {
        std::ifstream quota(directory + "/cpu.cfs_quota_us"), period(directory + "/cpu.cfs_period_us");
        if (!(quota >> quota_us) || !(period >> period_us)) return std::nullopt;
    }
    if (quota_us <= 0.0 || period_us <= 0.0) return std::nullopt;
    return quota_us / period_us;
}

}  // namespace

int quota_cores(const std::string& root) {
    const Hierarchies hierarchies = find_hierarchies(root);
    std::optional<double> least;
    // A line of /proc/self/cgroup: id:controllers:group; v2 has id 0 and no controllers.
    std::ifstream file(root + "/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
        const std::size_t first = line.find(':');
        const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const bool is_unified = controllers.empty();
        if (!is_unified && !has_word(controllers, "cpu")) continue;
        const std::optional<Mount>& mount = is_unified ? hierarchies.unified : hierarchies.cpu;
        if (!mount) continue;
        for (const std::string& directory : directories_of(*mount, line.substr(second + 1))) {
            const std::optional<double> quota = read_quota(root + directory, is_unified);
            if (quota && (!least || *quota < *least)) least = quota;
        }
    }
    return least ? std::max(1, static_cast<int>(std::ceil(*least))) : 0;
}

int usable_cores() {
    const int affinity = std::max(1, affinity_cores());
    const int quota = quota_cores("");
    return quota == 0 ? affinity : std::min(affinity, quota);
}

bool yields_fairly(const std::string& release) {
    int major = 0, minor = 0;
    if (std::sscanf(release.c_str(), "%d.%d", &major, &minor) != 2) return false;
    return major > 6 || (major == 6 && minor >= 6);
}

bool yields_fairly() {
    utsname name{};
    return uname(&name) == 0 && std::string_view(name.sysname) == "Linux" && yields_fairly(std::string(name.release));
}

}  // namespace stepmill
