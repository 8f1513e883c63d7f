// Ends a worker when its learner has ended, whatever its envs are doing: a native thread watches the learner's pidfd.
#pragma once

namespace stepmill {

inline constexpr int EXIT_LEARNER_GONE = 66;  // exit status of a worker whose learner has ended

// Starts a detached thread (all signals blocked, small stack) that waits until the process behind `pidfd` ends, and then calls
// _exit(EXIT_LEARNER_GONE). It uses a duplicate: the caller keeps `pidfd`. A forked child does not inherit the thread, so each process
// calls this function itself. Returns 0, or an errno if no thread was started.
[[nodiscard]] int watch_parent(int pidfd);

}  // namespace stepmill
