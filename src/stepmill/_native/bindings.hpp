// What each file adds to the module; module.cpp calls them all.
#pragma once

#include <nanobind/nanobind.h>

namespace stepmill {

void bind_core(nanobind::module_& module);    // Slab, Loop, Ledger
void bind_codec(nanobind::module_& module);   // encode, decode
void bind_system(nanobind::module_& module);  // OwnedFd, watch_parent, usable_cores, pidfd_send_signal, EXIT_LEARNER_GONE; what the system refuses becomes OSError
void bind_reaper(nanobind::module_& module);  // Reaper; after the class Slab
void bind_foreign(nanobind::module_& module);  // ForeignLoop; after the class Slab

}  // namespace stepmill
