// What Python asks the operating system through us: the watcher of the learner, usable cores, descriptors of processes
// (os.pidfd_open is missing from Pythons that were built on old kernel headers).
#include <cerrno>

#include "bindings.hpp"
#include "cores.hpp"
#include "finalization.hpp"
#include "pidfd.hpp"
#include "signals.hpp"
#include "watch.hpp"

namespace nb = nanobind;

namespace stepmill {

namespace {

void raise_if(int error) {
    if (error == 0) return;
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);  // picks the subclass: ESRCH is ProcessLookupError
    throw nb::python_error();
}

void start_watching(int pidfd) { raise_if(watch_parent(pidfd)); }

int open_process(int pid) {
    const int pidfd = open_pidfd(pid);
    raise_if(pidfd < 0 ? errno : 0);
    return pidfd;
}

void signal_process(int pidfd, int signal) { raise_if(signal_pidfd(pidfd, signal)); }

}  // namespace

void bind_system(nb::module_& module) {
    module.attr("EXIT_LEARNER_GONE") = EXIT_LEARNER_GONE;
    module.def("watch_parent", &start_watching, nb::arg("pidfd"),
               "End this process, by a native thread, as soon as the process behind `pidfd` has ended. Keeps a duplicate.");
    module.def("pidfd_open", &open_process, nb::arg("pid"),
               "Return a descriptor that polls readable once the process has ended. Raises ProcessLookupError if there is none.");
    module.def("pidfd_send_signal", &signal_process, nb::arg("pidfd"), nb::arg("signal"),
               "Send a signal to the process behind `pidfd`. Raises ProcessLookupError once it has ended.");
    module.def("is_from_signal", &is_from_signal, nb::arg("error"), nb::sig("def is_from_signal(error: BaseException) -> bool"),
               "Return whether an exception is a KeyboardInterrupt, or was raised by a signal handler.");
    module.def("begin_exit", &begin_exit,
               "Say that this thread runs the program's exit functions. Other threads that use a closed pool end by SystemExit from now on.");
    module.def("is_exiting", &is_exiting, "Return whether the program's exit functions run.");
    module.def("yields_fairly", [] { return yields_fairly(); }, "Return whether a thread that yields its core goes behind all that want it.");
    module.def("usable_cores", &usable_cores, "Return the number of cores this process may use: affinity mask and cgroup quota, at least 1.");
}

}  // namespace stepmill
