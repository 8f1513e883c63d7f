#include "shared/signals.hpp"

#include <algorithm>
#include <csignal>
#include <vector>

namespace nb = nanobind;

namespace stepmill {

namespace {

constexpr long CO_VARIABLE_ARGUMENTS = 0x04;  // CO_VARARGS in the flags of a code object: the function has *args

// Returns the positional arguments of a frame, in order; null for a deleted one.
std::vector<nb::object> arguments_of(nb::handle frame) {
    const nb::object code = nb::getattr(frame, "f_code"), names = nb::getattr(code, "co_varnames"), locals = nb::getattr(frame, "f_locals");
    const auto num_named = nb::cast<std::size_t>(nb::getattr(code, "co_argcount"));
    auto value_of = [&](std::size_t index) {
        nb::object value = nb::steal(PyObject_GetItem(locals.ptr(), nb::object(names[index]).ptr()));
        if (!value) PyErr_Clear();
        return value;
    };
    std::vector<nb::object> arguments;
    for (std::size_t i = 0; i < num_named; ++i) arguments.push_back(value_of(i));
    if ((nb::cast<long>(nb::getattr(code, "co_flags")) & CO_VARIABLE_ARGUMENTS) == 0) return arguments;
    const nb::object rest = value_of(num_named + nb::cast<std::size_t>(nb::getattr(code, "co_kwonlyargcount")));
    if (!rest || !PyTuple_Check(rest.ptr())) return arguments;
    for (nb::handle value : rest) arguments.push_back(nb::borrow(value));
    return arguments;
}

// Whether the frame is called as Python calls a signal handler: with a number and the interrupted frame.
bool is_called_as_handler(nb::handle frame) {
    const nb::object interrupted = nb::getattr(frame, "f_back");
    const std::vector<nb::object> arguments = arguments_of(frame);
    for (std::size_t i = 1; i < arguments.size() && !interrupted.is_none(); ++i) {
        if (arguments[i].is(interrupted) && arguments[i - 1] && PyLong_Check(arguments[i - 1].ptr())) return true;
    }
    return false;
}

// Returns the code that runs first when a handler is called; null if the handler is not written in Python.
nb::object code_of(nb::object handler) {
    constexpr int MAX_LAYERS = 8;
    const nb::object partial = nb::module_::import_("functools").attr("partial");
    for (int layer = 0; layer < MAX_LAYERS; ++layer) {
        if (PyFunction_Check(handler.ptr())) return nb::borrow(PyFunction_GetCode(handler.ptr()));
        if (PyMethod_Check(handler.ptr())) handler = nb::borrow(PyMethod_GET_FUNCTION(handler.ptr()));
        else if (nb::isinstance(handler, partial)) handler = nb::getattr(handler, "func");
        else if (Py_TYPE(handler.ptr())->tp_call != nullptr) handler = nb::getattr(handler.type(), "__call__", nb::none());
        else break;
    }
    return nb::object();
}

// Returns the code of all installed handlers. They identify a handler that has deleted its arguments.
std::vector<nb::object> installed_codes() {
    const nb::object get_handler = nb::module_::import_("_signal").attr("getsignal");
    std::vector<nb::object> codes;
    for (int number = 1; number < NSIG; ++number) {
        const nb::object handler = get_handler(number);
        if (PyLong_Check(handler.ptr()) || handler.is_none()) continue;  // SIG_DFL, SIG_IGN, or not a Python handler
        if (nb::object code = code_of(handler)) codes.push_back(std::move(code));
    }
    return codes;
}

bool has_handler_frame(nb::handle error) {
    const std::vector<nb::object> codes = installed_codes();
    auto is_installed = [&](nb::handle frame) {
        const nb::object own = nb::getattr(frame, "f_code");
        return std::ranges::any_of(codes, [&](const nb::object& code) { return code.is(own); });
    };
    nb::object trace = nb::getattr(error, "__traceback__");
    for (; !trace.is_none(); trace = nb::getattr(trace, "tb_next")) {
        const nb::object frame = nb::getattr(trace, "tb_frame");
        if (is_called_as_handler(frame) || is_installed(frame)) return true;
    }
    return false;
}

}  // namespace

bool is_from_signal(nb::handle error) {
    if (PyErr_GivenExceptionMatches(error.ptr(), PyExc_KeyboardInterrupt)) return true;
    try {
        return has_handler_frame(error);
    } catch (const std::exception&) {  // the handler's own class or metaclass raised
        PyErr_Clear();
        return false;
    }
}

}  // namespace stepmill
