// How many cores this process may really use: never the machine's count.
#pragma once

#include <string>

namespace stepmill {

// The smaller of the affinity mask and every cgroup CPU quota (v1 and v2, all levels) above this process, quota rounded
// up; at least 1. Reads /proc and /sys each time: ask once per pool. Falls back on the affinity mask alone.
int usable_cores();

// The quota part of the above for given files, so that a test can say what /proc holds: cores, rounded up, or 0 for
// "no limit". `root` is put before every path that is opened ("" on a real machine).
int quota_cores(const std::string& root);

}  // namespace stepmill
