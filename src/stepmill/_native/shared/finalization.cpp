// Threads that run after the interpreter. While Python finalizes, CPython before 3.14 calls pthread_exit() in every thread that asks for
// the GIL. glibc then unwinds the stack of the thread, and the destructors on the way drop references without the GIL, or the unwinding
// passes a noexcept function: the program crashes. CPython 3.14 makes such a thread hang instead, and so does this file.
#include <Python.h>

#include <unistd.h>
#include <unwind.h>

#if PY_VERSION_HEX >= 0x030D0000
#define STEPMILL_IS_FINALIZING Py_IsFinalizing
#else
#define STEPMILL_IS_FINALIZING _Py_IsFinalizing
#endif

// Every C++ frame of this module (and of nanobind) names __gxx_personality_v0 as the function that the unwinder calls before it runs the
// frame's destructors. The linker replaces it by this function (--wrap, see CMakeLists.txt).
extern "C" {

_Unwind_Reason_Code __real___gxx_personality_v0(int version, _Unwind_Action actions, _Unwind_Exception_Class exception_class,
                                                _Unwind_Exception* exception, _Unwind_Context* context);

_Unwind_Reason_Code __wrap___gxx_personality_v0(int version, _Unwind_Action actions, _Unwind_Exception_Class exception_class,
                                                _Unwind_Exception* exception, _Unwind_Context* context) {
    if ((actions & _UA_FORCE_UNWIND) != 0 && STEPMILL_IS_FINALIZING()) {
        for (;;) pause();  // until the process ends; the thread does not hold the GIL
    }
    return __real___gxx_personality_v0(version, actions, exception_class, exception, context);
}
}
