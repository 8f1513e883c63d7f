// What Python asks of the operating system through us: descriptors with one owner, the watcher of the learner, usable
// cores, descriptors of processes (os.pidfd_open is missing from Pythons that were built on old kernel headers).
#include <cerrno>
#include <exception>
#include <system_error>

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

#include "bindings.hpp"
#include "cores.hpp"
#include "finalization.hpp"
#include "owned_fd.hpp"
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

// Returns the owner of a descriptor that a system call has just returned. No byte code runs in between, so that no signal
// handler can raise between the call and the owner.
// In a program that has closed a standard stream its number is free; but a worker puts other files there.
OwnedFd own(int fd) {
    constexpr int FIRST = 3;
    raise_if(fd < 0 ? errno : 0);
    OwnedFd owned(fd);
    return fd < FIRST ? own(fcntl(fd, F_DUPFD_CLOEXEC, FIRST)) : std::move(owned);
}

void translate_system_error(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const std::system_error& refusal) {
        PyErr_SetObject(PyExc_OSError, nb::make_tuple(refusal.code().value(), refusal.what()).ptr());
    }
}

void start_watching(int pidfd) { raise_if(watch_parent(pidfd)); }

int open_process(int pid) { return own(open_pidfd(pid)).release(); }

void signal_process(int pidfd, int signal) { raise_if(signal_pidfd(pidfd, signal)); }

void append_result(nb::list results, nb::callable function) { results.append(function()); }

void bind_owned_fd(nb::module_& module) {
    nb::class_<OwnedFd>(module, "OwnedFd", "A descriptor and its one owner: closed once, by close(), from any thread, or when the owner is gone.")
        .def(nb::init<int>(), nb::arg("fd") = OwnedFd::NONE, "Take over a descriptor; -1 is none.")
        .def_static("duplicate", [](int fd) { return own(fcntl(fd, F_DUPFD_CLOEXEC, 3)); }, nb::arg("fd"), "Return the owner of a duplicate. This and all others are close-on-exec.")
        .def_static("memfd", [](const char* name, bool can_be_sealed) { return own(memfd_create(name, MFD_CLOEXEC | (can_be_sealed ? MFD_ALLOW_SEALING : 0U))); },
                    nb::arg("name"), nb::kw_only(), nb::arg("can_be_sealed") = false, "Return the owner of memory without a name in the file system.")
        .def_static("eventfd", [] { return own(eventfd(0, EFD_CLOEXEC)); }, "Return the owner of an event counter of 0.")
        .def_static("pidfd", [](int pid) { return own(open_pidfd(pid)); }, nb::arg("pid"),
                    "Return the owner of a descriptor that polls readable once the process has ended. Raises ProcessLookupError if there is none.")
        .def("fileno", &OwnedFd::number, "Return the descriptor; -1 if it owns none, or none any more.")
        .def("release", &OwnedFd::release, "Give the descriptor away: the caller owns it. Returns -1 if there is none.")
        .def("close", &OwnedFd::close, "Close the descriptor, if it is still open.");
}

}  // namespace

void bind_system(nb::module_& module) {
    nb::register_exception_translator(translate_system_error);
    bind_owned_fd(module);
    module.attr("EXIT_LEARNER_GONE") = EXIT_LEARNER_GONE;
    module.def("watch_parent", &start_watching, nb::arg("pidfd"),
               "End this process, by a native thread, as soon as the process behind `pidfd` has ended. Keeps a duplicate.");
    module.def("pidfd_open", &open_process, nb::arg("pid"), "Return a descriptor as OwnedFd.pidfd does, which the caller has to close.");
    module.def("pidfd_send_signal", &signal_process, nb::arg("pidfd"), nb::arg("signal"),
               "Send a signal to the process behind `pidfd`. Raises ProcessLookupError once it has ended.");
    module.def("is_from_signal", &is_from_signal, nb::arg("error"), nb::sig("def is_from_signal(error: BaseException) -> bool"),
               "Return whether an exception is a KeyboardInterrupt, or was raised by a signal handler.");
    module.def("begin_exit", &begin_exit,
               "Say that this thread runs the program's exit functions. Other threads that use a closed pool end by SystemExit from now on.");
    module.def("is_exiting", &is_exiting, "Return whether the program's exit functions run.");
    module.def("append_result", &append_result, nb::arg("results"), nb::arg("function"),
               "Append what a function without arguments returns to a list. No signal handler can raise between the two.");
    module.def("yields_fairly", [] { return yields_fairly(); }, "Return whether a thread that yields its core goes behind all that want it.");
    module.def("usable_cores", &usable_cores, "Return the number of cores this process may use: affinity mask and cgroup quota, at least 1.");
}

}  // namespace stepmill
