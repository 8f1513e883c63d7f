// How many cores this process may really use: never the machine's count.
#pragma once

#include <string>

namespace stepmill {

// The least of the affinity mask and of every cgroup CPU quota (v1 and v2, of all groups above this process; rounded
// up), at least 1. Reads /proc and /sys each time: ask once per pool.
int usable_cores();

// The quota's part of it, 0 where there is none. `root` comes before every path that is read, so that a test can say
// what /proc and /sys hold; "" is the machine.
int quota_cores(const std::string& root);

// Whether a thread that yields its core goes behind all that want it, as under EEVDF (Linux 6.6 and newer): many may spin
// then, if they yield. The scheduler before it often gave the core straight back.
bool yields_fairly();
bool yields_fairly(const std::string& release);  // by the kernel's version, "6.12.5-amd64"

}  // namespace stepmill
