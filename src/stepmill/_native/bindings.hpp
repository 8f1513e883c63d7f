// Each function adds the classes and functions of one file to the module; module.cpp calls them all.
#pragma once

#include <nanobind/nanobind.h>

namespace stepmill {

void bind_core(nanobind::module_& module);    // Slab, Loop, PoolState, ForeignLoop
void bind_codec(nanobind::module_& module);   // encode, decode
void bind_system(nanobind::module_& module);  // OwnedFd, watch_parent, usable_cores, pidfd_send_signal …; turns std::system_error into OSError
void bind_reaper(nanobind::module_& module);  // Reaper; must follow the class Slab
void bind_kernel(nanobind::module_& module);   // KernelLoop; must follow the class Slab
void bind_relay(nanobind::module_& module);    // PoolRelay, NodeRelay; must follow the class Slab

}  // namespace stepmill
