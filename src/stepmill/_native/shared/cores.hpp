// How many cores this process may use, which can be fewer than the machine has.
#pragma once

#include <string>

namespace stepmill {

// Returns the minimum of the affinity mask and all cgroup CPU quotas (v1 and v2, of this process's group and its ancestors; rounded up),
// at least 1. Reads /proc and /sys on each call: call it once per pool.
int usable_cores();

// Returns the quota alone, 0 without a quota. `root` is prepended to every path, so that a test can provide its own
// /proc and /sys; "" is the machine's.
int quota_cores(const std::string& root);

// Whether sched_yield puts the thread behind all other runnable threads, as EEVDF does (Linux 6.6 and newer): then many threads may
// spin if they yield. Older schedulers often return the core to the thread that yielded.
bool yields_fairly();
bool yields_fairly(const std::string& release);  // from the kernel's version, for example "6.12.5-amd64"

}  // namespace stepmill
