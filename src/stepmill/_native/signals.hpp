// Exceptions of the learner's signal handlers. Where an env runs in the learner's own thread, Python runs the handlers in the middle
// of the env's code, and what they raise comes out of the env.
#pragma once

#include <nanobind/nanobind.h>

namespace stepmill {

// Whether an exception is a KeyboardInterrupt, or was raised by a signal handler: it is the learner's, and no fault of the env that
// it comes out of. An exception that the env raises instead of it is the env's. Raises nothing; may run Python code only if a signal
// handler is an object of a class of its own.
bool is_from_signal(nanobind::handle error);

}  // namespace stepmill
