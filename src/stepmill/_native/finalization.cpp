// Threads that outlive the interpreter. While Python finalizes, CPython before 3.14 ends every thread that asks for the GIL by
// pthread_exit(). glibc unwinds the stack of such a thread, and the destructors that run on the way drop references without the
// GIL or pass a noexcept function: the program crashes. CPython 3.14 makes the thread hang instead, and so does this file.
#include <Python.h>

#include <unistd.h>
#include <unwind.h>

#if PY_VERSION_HEX >= 0x030D0000
#define STEPMILL_IS_FINALIZING Py_IsFinalizing
#else
#define STEPMILL_IS_FINALIZING _Py_IsFinalizing
#endif

// Every C++ frame of this module, nanobind's too, names __gxx_personality_v0 as the function that the unwinder calls before it runs
// the frame's destructors. The linker (--wrap, see CMakeLists.txt) puts this function in its place.
extern "C" {

_Unwind_Reason_Code __real___gxx_personality_v0(int version, _Unwind_Action actions, _Unwind_Exception_Class exception_class,
                                                _Unwind_Exception* exception, _Unwind_Context* context);

_Unwind_Reason_Code __wrap___gxx_personality_v0(int version, _Unwind_Action actions, _Unwind_Exception_Class exception_class,
                                                _Unwind_Exception* exception, _Unwind_Context* context) {
    if ((actions & _UA_FORCE_UNWIND) != 0 && STEPMILL_IS_FINALIZING()) {
        for (;;) pause();  // until the process ends; the GIL is not held
    }
    return __real___gxx_personality_v0(version, actions, exception_class, exception, context);
}
}
