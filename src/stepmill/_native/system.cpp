// System functions for Python: descriptors with one owner, the watcher of the learner, usable cores, descriptors of processes
// (os.pidfd_open is missing in Pythons that were built with old kernel headers).
#include <cerrno>
#include <exception>
#include <system_error>

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include "bindings.hpp"
#include "shared/cores.hpp"
#include "shared/finalization.hpp"
#include "shared/owned_fd.hpp"
#include "shared/pidfd.hpp"
#include "shared/py_ref.hpp"
#include "shared/signals.hpp"
#include "shared/learner_watch.hpp"

namespace nb = nanobind;

namespace stepmill {

namespace {

void raise_if(int error) {
    if (error != 0 && !set_os_error(error)) throw nb::python_error();
}

// Returns the owner of a descriptor that a system call has just returned. No byte code runs in between, so no signal handler can raise
// between the call and the owner.
// Numbers 0 to 2 may be free if the program has closed a standard stream, but workers redirect these: use a higher number.
OwnedFd owner_of(int fd) {
    constexpr int FIRST = 3;
    raise_if(fd < 0 ? errno : 0);
    OwnedFd owned(fd);
    return fd < FIRST ? owner_of(fcntl(fd, F_DUPFD_CLOEXEC, FIRST)) : std::move(owned);
}

void translate_system_error(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const std::system_error& refusal) {
        PyErr_SetObject(PyExc_OSError, nb::make_tuple(refusal.code().value(), refusal.what()).ptr());
    }
}

void start_watching(int pidfd) { raise_if(watch_parent(pidfd)); }

void signal_process(int pidfd, int signal) { raise_if(signal_pidfd(pidfd, signal)); }

void append_result(nb::list results, nb::callable function) { results.append(function()); }

void bind_owned_fd(nb::module_& module) {
    nb::class_<OwnedFd>(module, "OwnedFd", "Owner of a file descriptor, which is closed once: by close(), from any thread, or with the owner.")
        .def(nb::init<int>(), nb::arg("fd") = OwnedFd::NONE, "Take ownership of a descriptor; -1: none.")
        .def_static("duplicate", [](int fd) { return owner_of(fcntl(fd, F_DUPFD_CLOEXEC, 3)); }, nb::arg("fd"), "Return the owner of a duplicate. All descriptors are close-on-exec.")
        .def_static("memfd", [](const char* name, bool can_be_sealed) { return owner_of(memfd_create(name, MFD_CLOEXEC | (can_be_sealed ? MFD_ALLOW_SEALING : 0U))); },
                    nb::arg("name"), nb::kw_only(), nb::arg("can_be_sealed") = false, "Return the owner of a new memfd.")
        .def_static("eventfd", [] { return owner_of(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }, "Return the owner of a new event counter, at which no call waits.")
        .def_static("pidfd", [](int pid) { return owner_of(open_pidfd(pid)); }, nb::arg("pid"),
                    "Return the owner of a descriptor that polls readable after the process has ended. Raises ProcessLookupError if there is no such process.")
        .def("fileno", &OwnedFd::number, "Return the descriptor, or -1 after close() or release().")
        .def("release", &OwnedFd::release, "Transfer the descriptor to the caller. Returns -1 if there is none.")
        .def("close", &OwnedFd::close, "Close the descriptor, if it is still open.");
}

}  // namespace

void bind_system(nb::module_& module) {
    nb::register_exception_translator(translate_system_error);
    bind_owned_fd(module);
    module.attr("EXIT_LEARNER_GONE") = EXIT_LEARNER_GONE;
    module.def("watch_parent", &start_watching, nb::arg("pidfd"),
               "End this process, by a native thread, as soon as the process behind `pidfd` has ended. Keeps a duplicate.");
    module.def("pidfd_send_signal", &signal_process, nb::arg("pidfd"), nb::arg("signal"),
               "Send a signal to the process behind `pidfd`. Raises ProcessLookupError after it has ended.");
    module.def("is_from_signal", &is_from_signal, nb::arg("error"), nb::sig("def is_from_signal(error: BaseException) -> bool"),
               "Return whether an exception is a KeyboardInterrupt, or a signal handler raised it.");
    module.def("begin_exit", &begin_exit,
               "Record that this thread runs the program's exit functions. From now on SystemExit ends other threads that use a closed pool.");
    module.def("is_exiting", &is_exiting, "Return whether the program's exit functions run.");
    module.def("append_result", &append_result, nb::arg("results"), nb::arg("function"),
               "Append what a function without arguments returns to a list. No signal handler can raise in between.");
    module.def("yields_fairly", [] { return yields_fairly(); }, "Return whether sched_yield puts a thread behind all other runnable threads.");
    module.def("usable_cores", &usable_cores, "Return the number of cores this process may use: affinity mask and cgroup quota, at least 1.");
}

}  // namespace stepmill
