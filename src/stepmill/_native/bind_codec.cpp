// Python bindings of the codec. The hot loop and the pool state call codec.hpp directly.
#define NO_IMPORT_ARRAY
#include "bindings.hpp"
#include "codec/codec.hpp"
#include "shared/tree.hpp"

namespace stepmill {

namespace {

nb::bytes encode_object(nb::handle obj, nb::handle pickler) {
    std::vector<std::uint8_t> out;
    Encoder encoder(pickler.ptr());
    if (!encoder.encode(obj.ptr(), out)) throw nb::python_error();
    return nb::bytes(out.data(), out.size());
}

nb::object decode_bytes(const nb::bytes& data, nb::handle unpickler) {
    return checked(decode(static_cast<const std::uint8_t*>(data.data()), data.size(), {unpickler.ptr(), nullptr}));
}

nb::object decode_all(const nb::bytes& data, nb::handle unpickler, nb::handle objects) {
    std::size_t used = 0;
    return checked(decode_values(static_cast<const std::uint8_t*>(data.data()), data.size(), SIZE_MAX, {unpickler.ptr(), objects.ptr()}, used));
}

}  // namespace

void bind_codec(nb::module_& module) {
    module.def("encode", &encode_object, nb::arg("obj").none(), nb::arg("pickler").none(),
               nb::sig("def encode(obj: object, pickler: collections.abc.Callable[[object], bytes] | None) -> bytes"),
               "Return `obj` as bytes, each part with its exact type; `pickler(part) -> bytes` encodes parts that the codec cannot.");
    module.def("decode", &decode_bytes, nb::arg("data"), nb::arg("unpickler").none(),
               nb::sig("def decode(data: bytes, unpickler: collections.abc.Callable[[bytes], object] | None) -> object"),
               "Return the object that `data` encodes. Raises ValueError if `data` is invalid; safe for any bytes.");
    module.def("decode_all", &decode_all, nb::arg("data"), nb::arg("unpickler").none(), nb::arg("objects").none(),
               nb::sig("def decode_all(data: bytes, unpickler: collections.abc.Callable[[bytes], object] | None, objects: list[object] | None) -> tuple[object, ...]"),
               "Return a tuple of the values that follow each other in `data`; `objects` are those that were passed by reference.");
}

}  // namespace stepmill
