// A worker must not outlive its learner, whatever the env is doing: a native thread watches the learner's pidfd.
#pragma once

namespace stepmill {

inline constexpr int EXIT_LEARNER_GONE = 66;  // the exit code of a worker whose learner is gone

// Start a detached thread (all signals blocked, small stack) that waits for the process behind `pidfd` and then ends
// this process by _exit(EXIT_LEARNER_GONE). The thread works on its own duplicate of `pidfd`; the caller keeps its own.
// Call it in each forked child again: threads do not survive a fork. Returns 0 or an errno.
[[nodiscard]] int watch_parent(int pidfd);

}  // namespace stepmill
