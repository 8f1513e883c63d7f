// What each file adds to the module; module.cpp calls them all.
#pragma once

#include <nanobind/nanobind.h>

namespace stepmill {

void bind_core(nanobind::module_& module);    // Slab, Loop, Ledger
void bind_codec(nanobind::module_& module);   // encode, decode
void bind_system(nanobind::module_& module);  // watch_parent, usable_cores, pidfd_open, pidfd_send_signal, EXIT_LEARNER_GONE
void bind_reaper(nanobind::module_& module);  // Reaper; after the class Slab
void bind_foreign(nanobind::module_& module);  // ForeignLoop; after the class Slab

}  // namespace stepmill
