// Exceptions of the learner's signal handlers. If an env runs in the learner's thread, Python runs the handlers inside the env's code, and
// their exceptions leave the env.
#pragma once

#include <nanobind/nanobind.h>

namespace stepmill {

// Whether an exception is a KeyboardInterrupt, or a signal handler raised it. Then it belongs to the learner and is not a fault of the env.
// An exception that the env raises in its place is the env's. Raises nothing; runs Python code only if a handler is an object of a user's
// class.
bool is_from_signal(nanobind::handle error);

}  // namespace stepmill
