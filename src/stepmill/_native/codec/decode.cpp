// Bytes to Python values. codec.hpp has the contract, codec_format.hpp the byte format.
//
// The bytes are not trusted: a worker may have died while it wrote them. Every read is checked against the end, and every count against
// the bytes that are left, so that the reader never allocates more than the payload could fill.
#define NO_IMPORT_ARRAY
#include "shared/numpy_api.hpp"

#include "codec/codec.hpp"
#include "codec/codec_format.hpp"
#include "shared/py_ref.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <string>
#include <utility>

namespace stepmill {

namespace {

// Infos have the same keys in every step, so their str objects are cached, in a table with one entry per hash. A key that occurs a second
// time is interned: then a look-up by a literal compares pointers. A key that occurs once is not interned, since CPython 3.12 never frees
// interned strings.
// Guarded by the GIL. The cached references live as long as the process.
class KeyCache {
   public:
    // Returns a new reference to the str of these bytes, or null with an exception set.
    PyObject* get(const char* utf8, std::size_t size) {
        if (size > MAX_KEY_BYTES) return PyUnicode_DecodeUTF8(utf8, static_cast<Py_ssize_t>(size), "surrogatepass");
        Place& place = places_[hash(utf8, size) % places_.size()];
        if (place.key != nullptr && is_same(place.key, utf8, size)) {
            if (!place.is_interned) PyUnicode_InternInPlace(&place.key);
            place.is_interned = true;
            return Py_NewRef(place.key);
        }
        PyObject* key = PyUnicode_DecodeUTF8(utf8, static_cast<Py_ssize_t>(size), "surrogatepass");
        if (key != nullptr && PyUnicode_IS_COMPACT_ASCII(key)) {
            PyObject* old = place.key;
            place = Place{Py_NewRef(key), false};
            Py_XDECREF(old);
        }
        return key;
    }

   private:
    static constexpr std::size_t MAX_KEY_BYTES = 64;

    struct Place {
        PyObject* key;
        bool is_interned;
    };

    static std::size_t hash(const char* utf8, std::size_t size) {
        std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
        for (std::size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<std::uint8_t>(utf8[i])) * 0x100000001b3u;
        return static_cast<std::size_t>(hash ^ hash >> 32);
    }

    static bool is_same(PyObject* key, const char* utf8, std::size_t size) {
        return static_cast<std::size_t>(PyUnicode_GET_LENGTH(key)) == size && std::memcmp(PyUnicode_1BYTE_DATA(key), utf8, size) == 0;
    }

    std::array<Place, 1024> places_{};
};

PyObject* cached_key(const char* utf8, std::size_t size) {
    static KeyCache cache;
    return cache.get(utf8, size);
}

struct Shape {
    int ndim{0};
    npy_intp lengths[MAX_NATIVE_NDIM]{};
    std::size_t num_bytes{0};
};

// Reads one payload from front to back. A method that fails returns null (or false) with a Python exception set.
class Reader {
   public:
    Reader(const std::uint8_t* data, std::size_t size, DecodeContext context)
        : begin_(data == nullptr ? &NOTHING : data), at_(begin_), end_(begin_ + (data == nullptr ? 0 : size)), num_items_left_(size),
          unpickler_(context.unpickler == Py_None ? nullptr : context.unpickler), objects_(context.objects == Py_None ? nullptr : context.objects) {}

    PyObject* value(int depth);
    bool finish();
    bool has_more() const { return at_ != end_; }
    std::size_t used() const { return static_cast<std::size_t>(at_ - begin_); }

   private:
    static constexpr std::uint8_t NOTHING = 0;

    std::size_t left() const { return static_cast<std::size_t>(end_ - at_); }

    std::nullptr_t fail(const char* what) const {
        PyErr_Format(PyExc_ValueError, "payload %s (at byte %zd of %zd); it was cut off or overwritten, so its values are lost", what,
                     static_cast<Py_ssize_t>(at_ - begin_), static_cast<Py_ssize_t>(end_ - begin_));
        return nullptr;
    }
    std::nullptr_t fail_from_current(const char* what) const;

    const std::uint8_t* read_bytes(std::size_t size) {
        if (size > left()) return fail("ends inside a value");
        return std::exchange(at_, at_ + size);
    }
    bool byte(unsigned& out) {
        const std::uint8_t* data = read_bytes(1);
        if (data != nullptr) out = *data;
        return data != nullptr;
    }
    template <typename T>
    bool fixed(T& out) {
        const std::uint8_t* data = read_bytes(sizeof out);
        if (data != nullptr) std::memcpy(&out, data, sizeof out);
        return data != nullptr;
    }
    bool varint(std::uint64_t& out);
    const char* blob(std::size_t& size);
    bool count(std::size_t& out);

    PyObject* integer();
    PyObject* big_integer();
    PyObject* floating();
    PyObject* complex();
    PyObject* text(Tag kind);
    PyObject* bytes();
    PyObject* pickled();
    PyObject* referred();
    PyObject* scalar();
    PyObject* array();
    bool array_type(PyRef& type, std::size_t& item_bytes);
    bool array_shape(std::size_t item_bytes, Shape& shape);
    bool are_items_legal(PyArrayObject* array) const;
    PyObject* dict(int depth);
    template <bool IS_LIST>
    PyObject* sequence(int depth);

    const std::uint8_t* begin_;
    const std::uint8_t* at_;
    const std::uint8_t* end_;
    std::size_t num_items_left_;  // each item takes at least one byte, so the sum of all counts cannot exceed the size
    PyObject* unpickler_;
    PyObject* objects_;
};

// Replaces the current exception by a ValueError and keeps it as the cause. Leaves MemoryError and exceptions that are not subclasses of
// Exception (KeyboardInterrupt) as they are.
std::nullptr_t Reader::fail_from_current(const char* what) const {
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)) return nullptr;
    PyObject* cause = raised_exception();
    fail(what);
    const PyRef error(raised_exception());
    PyException_SetCause(error.get(), cause);  // steals our reference
    set_exception(error.get());
    return nullptr;
}

bool Reader::varint(std::uint64_t& out) {
    out = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        unsigned part = 0;
        if (!byte(part)) return false;
        if (shift == 63 && part > 1) break;
        out |= static_cast<std::uint64_t>(part & 0x7f) << shift;
        if (part < 0x80) return true;
    }
    return fail("holds a number that is too long") != nullptr;
}

const char* Reader::blob(std::size_t& size) {
    std::uint64_t length = 0;
    if (!varint(length)) return nullptr;
    if (length > left()) return fail("ends inside a value");
    size = static_cast<std::size_t>(length);
    return reinterpret_cast<const char*>(read_bytes(size));
}

bool Reader::count(std::size_t& out) {
    std::uint64_t count = 0;
    if (!varint(count)) return false;
    if (count > num_items_left_ || count > left()) return fail("holds a container that is larger than the payload") != nullptr;
    out = static_cast<std::size_t>(count);
    num_items_left_ -= out;
    return true;
}

PyObject* Reader::integer() {
    std::int64_t number = 0;
    return fixed(number) ? PyLong_FromLongLong(number) : nullptr;
}

PyObject* Reader::big_integer() {
    std::size_t size = 0;
    const char* data = blob(size);
    if (data == nullptr) return nullptr;
    const std::string digits(data, size);  // terminated by a zero, which the parser needs
    char* stop = nullptr;
    PyObject* number = PyLong_FromString(digits.c_str(), &stop, 16);
    if (number == nullptr) return fail_from_current("holds an invalid integer");
    if (stop == digits.c_str() + digits.size()) return number;
    Py_DECREF(number);
    return fail("holds an invalid integer");
}

PyObject* Reader::floating() {
    double number = 0.0;
    return fixed(number) ? PyFloat_FromDouble(number) : nullptr;
}

PyObject* Reader::complex() {
    double parts[2] = {};
    return fixed(parts) ? PyComplex_FromDoubles(parts[0], parts[1]) : nullptr;
}

PyObject* Reader::text(Tag kind) {
    std::size_t size = 0;
    const char* data = blob(size);
    if (data == nullptr) return nullptr;
    PyObject* text = kind == Tag::KEY ? cached_key(data, size) : PyUnicode_DecodeUTF8(data, static_cast<Py_ssize_t>(size), "surrogatepass");
    return text != nullptr ? text : fail_from_current("holds a str that is not UTF-8");
}

PyObject* Reader::bytes() {
    std::size_t size = 0;
    const char* data = blob(size);
    return data != nullptr ? PyBytes_FromStringAndSize(data, static_cast<Py_ssize_t>(size)) : nullptr;
}

PyObject* Reader::pickled() {
    if (unpickler_ == nullptr) return fail("holds a pickled value, and there is no unpickler");
    const PyRef data(bytes());
    if (data == nullptr) return nullptr;
    return PyObject_CallOneArg(unpickler_, data.get());
}

PyObject* Reader::referred() {
    std::uint64_t place = 0;
    if (!varint(place)) return nullptr;
    const bool is_there = objects_ != nullptr && PyList_Check(objects_) && place < static_cast<std::uint64_t>(PyList_GET_SIZE(objects_));
    return is_there ? Py_NewRef(PyList_GET_ITEM(objects_, static_cast<Py_ssize_t>(place))) : fail("refers to a missing object");
}

PyObject* Reader::scalar() {
    unsigned code = 0;
    if (!byte(code)) return nullptr;
    const ScalarKind* kind = scalar_kind_of_code(code);
    if (kind == nullptr) return fail("holds a NumPy scalar of unknown type");
    const std::uint8_t* item = read_bytes(kind->size_bytes);
    if (item == nullptr) return nullptr;
    if (code == NPY_BOOL) return Py_NewRef(*item != 0 ? PyArrayScalar_True : PyArrayScalar_False);
    PyObject* scalar = kind->type->tp_alloc(kind->type, 0);
    if (scalar != nullptr) std::memcpy(reinterpret_cast<std::uint8_t*>(scalar) + kind->offset, item, kind->size_bytes);
    return scalar;
}

// Reads the item type of an array; `item_bytes` is at least 1.
bool Reader::array_type(PyRef& type, std::size_t& item_bytes) {
    unsigned code = 0, is_swapped = 0;
    if (!byte(code) || !byte(is_swapped)) return false;
    const bool is_text = code == NPY_STRING || code == NPY_UNICODE;
    const ScalarKind* kind = scalar_kind_of_code(code);
    if (is_swapped > 1 || (!is_text && kind == nullptr)) return fail("holds an array of unknown type") != nullptr;

    std::uint64_t size = is_text ? 0 : kind->size_bytes;
    if (is_text && !varint(size)) return false;
    const std::uint64_t unit = code == NPY_UNICODE ? 4 : 1;
    if (size == 0 || size > INT32_MAX || size % unit != 0) return fail("holds an array with an invalid item size") != nullptr;
    item_bytes = static_cast<std::size_t>(size);

    // A text dtype is created for each array and may be changed; a number dtype is shared.
    PyArray_Descr* descr = is_text ? PyArray_DescrNewFromType(static_cast<int>(code)) : PyArray_DescrFromType(static_cast<int>(code));
    if (descr == nullptr) return false;
    if (is_text) PyDataType_SET_ELSIZE(descr, static_cast<npy_intp>(size));
    type.reset(reinterpret_cast<PyObject*>(descr));
    if (is_swapped == 1) type.reset(reinterpret_cast<PyObject*>(PyArray_DescrNewByteorder(descr, NPY_SWAP)));
    return type != nullptr;
}

// Reads the dimensions of an array and checks that its items fit in the bytes that are left.
bool Reader::array_shape(std::size_t item_bytes, Shape& shape) {
    unsigned ndim = 0;
    if (!byte(ndim)) return false;
    if (ndim > static_cast<unsigned>(MAX_NATIVE_NDIM)) return fail("holds an array of too many dimensions") != nullptr;
    shape.ndim = static_cast<int>(ndim);
    // NumPy limits the product of all non-zero dimensions, even of an empty array.
    std::uint64_t extent = item_bytes;
    bool is_empty = false;
    for (unsigned axis = 0; axis < ndim; ++axis) {
        std::uint64_t length = 0;
        if (!varint(length)) return false;
        is_empty |= length == 0;
        if (length != 0 && __builtin_mul_overflow(extent, length, &extent)) return fail("holds an array that is too large") != nullptr;
        shape.lengths[axis] = static_cast<npy_intp>(length);
    }
    if (extent > static_cast<std::uint64_t>(NPY_MAX_INTP)) return fail("holds an array that is too large") != nullptr;
    shape.num_bytes = is_empty ? 0 : static_cast<std::size_t>(extent);
    return shape.num_bytes <= left() || fail("ends inside an array") != nullptr;
}

// NumPy and Python assume that bools are 0 or 1 and that characters are valid code points.
bool Reader::are_items_legal(PyArrayObject* array) const {
    const auto* items = static_cast<const std::uint8_t*>(PyArray_DATA(array));
    const auto num_bytes = static_cast<std::size_t>(PyArray_NBYTES(array));
    bool is_legal = true;
    if (PyArray_TYPE(array) == NPY_BOOL) {
        is_legal = std::all_of(items, items + num_bytes, [](std::uint8_t item) { return item <= 1; });
    }
    if (PyArray_TYPE(array) == NPY_UNICODE) {
        for (std::size_t i = 0; i < num_bytes; i += 4) {
            std::uint32_t point = 0;
            std::memcpy(&point, items + i, 4);
            if (PyArray_ISBYTESWAPPED(array)) point = __builtin_bswap32(point);
            is_legal &= point <= 0x10ffff;
        }
    }
    return is_legal || fail("holds an array with invalid items") != nullptr;
}

PyObject* Reader::array() {
    PyRef type;
    std::size_t item_bytes = 0;
    Shape shape;
    if (!array_type(type, item_bytes) || !array_shape(item_bytes, shape)) return nullptr;
    const std::uint8_t* items = read_bytes(shape.num_bytes);
    auto* descr = reinterpret_cast<PyArray_Descr*>(type.release());  // the array steals it
    PyRef array(PyArray_NewFromDescr(&PyArray_Type, descr, shape.ndim, shape.lengths, nullptr, nullptr, 0, nullptr));
    if (array == nullptr) return fail_from_current("holds an array that NumPy cannot create");
    auto* target = reinterpret_cast<PyArrayObject*>(array.get());
    if (shape.num_bytes != 0) std::memcpy(PyArray_DATA(target), items, shape.num_bytes);
    return are_items_legal(target) ? array.release() : nullptr;
}

PyObject* Reader::dict(int depth) {
    std::size_t num_items = 0;
    if (!count(num_items)) return nullptr;
    PyRef dict(PyDict_New());
    for (std::size_t i = 0; dict != nullptr && i < num_items; ++i) {
        const PyRef key(value(depth + 1));
        if (key == nullptr) return nullptr;
        const PyRef item(value(depth + 1));
        if (item == nullptr) return nullptr;
        if (PyDict_SetItem(dict.get(), key.get(), item.get()) != 0) return fail_from_current("holds a dict with an unhashable key");
    }
    return dict.release();
}

template <bool IS_LIST>
PyObject* Reader::sequence(int depth) {
    std::size_t num_items = 0;
    if (!count(num_items)) return nullptr;
    const auto size = static_cast<Py_ssize_t>(num_items);
    PyRef sequence(IS_LIST ? PyList_New(size) : PyTuple_New(size));
    for (Py_ssize_t i = 0; sequence != nullptr && i < size; ++i) {
        PyObject* item = value(depth + 1);
        if (item == nullptr) return nullptr;
        if constexpr (IS_LIST) {
            PyList_SET_ITEM(sequence.get(), i, item);
        } else {
            PyTuple_SET_ITEM(sequence.get(), i, item);
        }
    }
    return sequence.release();
}

PyObject* Reader::value(int depth) {
    unsigned tag = 0;
    if (depth > CODEC_MAX_DEPTH) return fail("is nested too deep");
    if (!byte(tag)) return nullptr;
    switch (static_cast<Tag>(tag)) {
        case Tag::NONE: return Py_NewRef(Py_None);
        case Tag::FALSE: return Py_NewRef(Py_False);
        case Tag::TRUE: return Py_NewRef(Py_True);
        case Tag::INT: return integer();
        case Tag::BIG_INT: return big_integer();
        case Tag::FLOAT: return floating();
        case Tag::COMPLEX: return complex();
        case Tag::STR: return text(Tag::STR);
        case Tag::KEY: return text(Tag::KEY);
        case Tag::BYTES: return bytes();
        case Tag::SCALAR: return scalar();
        case Tag::ARRAY: return array();
        case Tag::DICT: return dict(depth);
        case Tag::LIST: return sequence<true>(depth);
        case Tag::TUPLE: return sequence<false>(depth);
        case Tag::PICKLE: return pickled();
        case Tag::OBJECT: return referred();
    }
    return fail("holds a value of unknown kind");
}

bool Reader::finish() { return at_ == end_ || fail("goes on after its value") != nullptr; }

}  // namespace

PyObject* decode(const std::uint8_t* data, std::size_t size, DecodeContext context) {
    Reader reader(data, size, context);
    try {
        PyRef value(reader.value(0));
        return value != nullptr && reader.finish() ? value.release() : nullptr;
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

PyObject* decode_values(const std::uint8_t* data, std::size_t size, std::size_t max_values, DecodeContext context, std::size_t& used) {
    Reader reader(data, size, context);
    try {
        const PyRef values(PyList_New(0));
        for (std::size_t i = 0; values != nullptr && i < max_values && reader.has_more(); ++i) {
            const PyRef value(reader.value(0));
            if (value == nullptr || PyList_Append(values.get(), value.get()) != 0) return nullptr;
        }
        used = reader.used();
        return values == nullptr ? nullptr : PyList_AsTuple(values.get());
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

}  // namespace stepmill
