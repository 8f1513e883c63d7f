// A worker must not outlive its learner, whatever its envs are doing: a native thread watches the learner's pidfd.
#pragma once

namespace stepmill {

inline constexpr int EXIT_LEARNER_GONE = 66;  // exit status of a worker that found its learner gone

// Starts a detached thread (all signals blocked, small stack) that waits for the process behind `pidfd` to end and then
// ends this one by _exit(EXIT_LEARNER_GONE). It works on a duplicate: the caller keeps `pidfd`. A thread does not live
// on in a forked child, so each process calls this for itself. Returns 0, or an errno and there is no thread.
[[nodiscard]] int watch_parent(int pidfd);

}  // namespace stepmill
