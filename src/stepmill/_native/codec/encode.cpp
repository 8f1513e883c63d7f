// Python values to bytes. codec.hpp has the contract, codec_format.hpp the byte format.
#define NO_IMPORT_ARRAY
#include "shared/numpy_api.hpp"

#include "codec/codec.hpp"
#include "codec/codec_format.hpp"
#include "shared/py_ref.hpp"

#include <cstring>
#include <new>
#include <string>
#include <utility>

namespace stepmill {

const std::array<ScalarKind, NUM_SCALAR_KINDS>& scalar_kinds() {
#define STEPMILL_KIND(Name, CODE) \
    ScalarKind { &Py##Name##ArrType_Type, CODE, sizeof(Py##Name##ScalarObject::obval), offsetof(Py##Name##ScalarObject, obval) }
    static const std::array<ScalarKind, NUM_SCALAR_KINDS> kinds{{
        STEPMILL_KIND(Double, NPY_DOUBLE),
        STEPMILL_KIND(Float, NPY_FLOAT),
        STEPMILL_KIND(Long, NPY_LONG),
        STEPMILL_KIND(Bool, NPY_BOOL),
        STEPMILL_KIND(Int, NPY_INT),
        STEPMILL_KIND(UByte, NPY_UBYTE),
        STEPMILL_KIND(Byte, NPY_BYTE),
        STEPMILL_KIND(Short, NPY_SHORT),
        STEPMILL_KIND(UShort, NPY_USHORT),
        STEPMILL_KIND(UInt, NPY_UINT),
        STEPMILL_KIND(ULong, NPY_ULONG),
        STEPMILL_KIND(LongLong, NPY_LONGLONG),
        STEPMILL_KIND(ULongLong, NPY_ULONGLONG),
        STEPMILL_KIND(Half, NPY_HALF),
        STEPMILL_KIND(LongDouble, NPY_LONGDOUBLE),
        STEPMILL_KIND(CFloat, NPY_CFLOAT),
        STEPMILL_KIND(CDouble, NPY_CDOUBLE),
        STEPMILL_KIND(CLongDouble, NPY_CLONGDOUBLE),
    }};
#undef STEPMILL_KIND
    return kinds;
}

const ScalarKind* scalar_kind_of_code(unsigned code) {
    for (const ScalarKind& kind : scalar_kinds()) {
        if (kind.code == code) return &kind;
    }
    return nullptr;
}

namespace {

enum class Outcome {
    DONE,
    FAILED,       // a Python exception is set
    TOO_COMPLEX,  // nested too deep or too many parts: pickle the whole object
};

const ScalarKind* scalar_kind_of_type(const PyTypeObject* type) {
    for (const ScalarKind& kind : scalar_kinds()) {
        if (kind.type == type) return &kind;
    }
    return nullptr;
}

// Visits one object and appends its bytes. Python code runs only in `pickle`, and it may change the containers: so an item is referenced
// while it is written, and the count of a container is written after its items.
class Writer {
   public:
    Writer(PyObject* pickler, std::vector<std::uint8_t>& out, PyObject** objects) : pickler_(pickler), out_(out), objects_(objects) {}

    Outcome value(PyObject* obj, int depth);
    Outcome pickle(PyObject* obj);
    bool has_pickled() const { return has_pickled_; }
    const std::string& failed_at() const { return failed_at_; }  // path of the part that could not be encoded, for example "['x'][2]"

   private:
    void raw(const void* data, std::size_t size) {
        const auto* bytes = static_cast<const std::uint8_t*>(data);
        out_.insert(out_.end(), bytes, bytes + size);
    }
    void tag(Tag tag) { out_.push_back(static_cast<std::uint8_t>(tag)); }
    template <typename T>
    void fixed(Tag tag, const T& item) {
        std::uint8_t bytes[1 + sizeof(T)];
        bytes[0] = static_cast<std::uint8_t>(tag);
        std::memcpy(bytes + 1, &item, sizeof(T));
        raw(bytes, sizeof bytes);
    }
    void varint(std::uint64_t number) {
        for (; number >= 0x80; number >>= 7) out_.push_back(static_cast<std::uint8_t>(number | 0x80));
        out_.push_back(static_cast<std::uint8_t>(number));
    }
    void blob(Tag kind, const void* data, std::size_t size) {
        tag(kind);
        varint(size);
        raw(data, size);
    }

    Outcome integer(PyObject* obj);
    Outcome text(Tag kind, PyObject* obj);
    Outcome scalar(const ScalarKind& kind, PyObject* obj);
    Outcome array(PyArrayObject* array);
    Outcome dict(PyObject* dict, int depth);
    template <bool IS_LIST>
    Outcome sequence(PyObject* sequence, int depth);
    Outcome refer(PyObject* obj);
    Outcome failed_under(PyObject* key);
    void name_place(const std::string& place);
    Outcome key(PyObject* obj, int depth) { return PyUnicode_CheckExact(obj) ? text(Tag::KEY, obj) : value(obj, depth); }

    // The count precedes the items but is known only after them: one byte is reserved, and more are inserted at the end if needed.
    std::size_t open_count() {
        const std::size_t at = out_.size();
        out_.push_back(0);
        return at;
    }
    void close_count(std::size_t at, std::size_t count);

    PyObject* pickler_;
    std::vector<std::uint8_t>& out_;
    PyObject** objects_;
    std::string failed_at_;
    std::size_t num_nodes_{0};
    bool has_pickled_{false};
};

// Saves the current exception while Python code runs that must not see it. The destructor restores it.
class SavedException {
   public:
    SavedException() { PyErr_Fetch(&type_, &value_, &traceback_); }
    ~SavedException() { PyErr_Restore(type_, value_, traceback_); }
    SavedException(const SavedException&) = delete;
    SavedException& operator=(const SavedException&) = delete;

   private:
    PyObject *type_{nullptr}, *value_{nullptr}, *traceback_{nullptr};
};

std::string text_of(PyObject* obj, PyObject* (*read)(PyObject*)) {
    const PyRef text(read(obj));
    const char* utf8 = text != nullptr ? PyUnicode_AsUTF8(text.get()) : nullptr;
    if (utf8 == nullptr) PyErr_Clear();  // __str__ or __repr__ of the class raised
    return utf8 != nullptr ? utf8 : "?";
}

// Replaces the current exception by a TypeError that names the part that cannot be pickled. Leaves MemoryError and exceptions that are
// not subclasses of Exception (KeyboardInterrupt) as they are.
void name_failure(const std::string& part) {
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)) return;
    PyRef cause(raised_exception());
    const std::string what = std::string(Py_TYPE(cause.get())->tp_name) + ": " + text_of(cause.get(), PyObject_Str);
    PyErr_Format(PyExc_TypeError, "%s cannot be pickled (%s)", part.c_str(), what.c_str());
    const PyRef error(raised_exception());
    PyException_SetCause(error.get(), cause.release());
    set_exception(error.get());
}

void Writer::close_count(std::size_t at, std::size_t count) {
    out_[at] = static_cast<std::uint8_t>(count & 0x7f);
    if (count < 0x80) return;
    out_[at] |= 0x80;
    std::uint8_t rest[MAX_VARINT_BYTES];
    std::size_t used = 0;
    for (count >>= 7; count >= 0x80; count >>= 7) rest[used++] = static_cast<std::uint8_t>(count | 0x80);
    rest[used++] = static_cast<std::uint8_t>(count);
    out_.insert(out_.begin() + static_cast<std::ptrdiff_t>(at) + 1, rest, rest + used);
}

Outcome Writer::pickle(PyObject* obj) {
    if (pickler_ == nullptr) {
        PyErr_Format(PyExc_TypeError, "a value of type %.200s needs a pickler; pass one to encode()",
                     Py_TYPE(obj)->tp_name);
        return Outcome::FAILED;
    }
    const PyRef pickled(PyObject_CallOneArg(pickler_, obj));
    if (pickled == nullptr) {
        const bool is_referable = objects_ != nullptr && PyErr_ExceptionMatches(PyExc_Exception) && !PyErr_ExceptionMatches(PyExc_MemoryError);
        return is_referable ? refer(obj) : Outcome::FAILED;
    }
    if (!PyBytes_CheckExact(pickled.get())) {
        PyErr_Format(PyExc_TypeError, "the pickler returned %.200s for a value of type %.200s; it must return bytes",
                     Py_TYPE(pickled.get())->tp_name, Py_TYPE(obj)->tp_name);
        return Outcome::FAILED;
    }
    has_pickled_ = true;
    blob(Tag::PICKLE, PyBytes_AS_STRING(pickled.get()), static_cast<std::size_t>(PyBytes_GET_SIZE(pickled.get())));
    return Outcome::DONE;
}

// Passes an object that cannot be pickled by reference.
Outcome Writer::refer(PyObject* obj) {
    PyErr_Clear();
    if (*objects_ == nullptr) *objects_ = PyList_New(0);
    if (*objects_ == nullptr || PyList_Append(*objects_, obj) != 0) return Outcome::FAILED;
    tag(Tag::OBJECT);
    varint(static_cast<std::uint64_t>(PyList_GET_SIZE(*objects_)) - 1);
    return Outcome::DONE;
}

Outcome Writer::failed_under(PyObject* key) {
    const SavedException held;
    name_place(text_of(key, PyObject_Repr));
    return Outcome::FAILED;
}

void Writer::name_place(const std::string& place) {
    std::string whole(1, '[');
    whole += place;
    whole += ']';
    whole += failed_at_;
    failed_at_ = std::move(whole);
}

Outcome Writer::integer(PyObject* obj) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(obj, &overflow);
    if (overflow == 0) {
        fixed(Tag::INT, static_cast<std::int64_t>(number));
        return Outcome::DONE;
    }
    const PyRef digits(PyNumber_ToBase(obj, 16));  // takes linear time, and has no limit on the number of digits
    return digits == nullptr ? Outcome::FAILED : text(Tag::BIG_INT, digits.get());
}

Outcome Writer::text(Tag kind, PyObject* obj) {
    Py_ssize_t size = 0;
    const char* utf8 = PyUnicode_AsUTF8AndSize(obj, &size);
    if (utf8 != nullptr) {
        blob(kind, utf8, static_cast<std::size_t>(size));
        return Outcome::DONE;
    }
    if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) return Outcome::FAILED;
    PyErr_Clear();
    const PyRef bytes(PyUnicode_AsEncodedString(obj, "utf-8", "surrogatepass"));
    if (bytes == nullptr) return Outcome::FAILED;
    blob(kind, PyBytes_AS_STRING(bytes.get()), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes.get())));
    return Outcome::DONE;
}

Outcome Writer::scalar(const ScalarKind& kind, PyObject* obj) {
    std::uint8_t bytes[2 + 32];
    bytes[0] = static_cast<std::uint8_t>(Tag::SCALAR);
    bytes[1] = kind.code;
    std::memcpy(bytes + 2, reinterpret_cast<const std::uint8_t*>(obj) + kind.offset, kind.size_bytes);
    raw(bytes, 2u + kind.size_bytes);
    return Outcome::DONE;
}

Outcome Writer::array(PyArrayObject* array) {
    const int code = PyArray_TYPE(array);
    const bool is_text = code == NPY_STRING || code == NPY_UNICODE;
    const bool is_native = is_text ? PyArray_ITEMSIZE(array) > 0 : code >= 0 && scalar_kind_of_code(static_cast<unsigned>(code)) != nullptr;
    auto* obj = reinterpret_cast<PyObject*>(array);
    if (!is_native || PyArray_NDIM(array) > MAX_NATIVE_NDIM) return pickle(obj);

    // Copy first, then read the shape: NumPy may release the GIL while it copies.
    const PyRef flat(PyArray_IS_C_CONTIGUOUS(array) ? Py_NewRef(obj) : PyArray_NewCopy(array, NPY_CORDER));
    if (flat == nullptr) return Outcome::FAILED;
    auto* source = reinterpret_cast<PyArrayObject*>(flat.get());
    tag(Tag::ARRAY);
    out_.push_back(static_cast<std::uint8_t>(code));
    out_.push_back(PyArray_ISBYTESWAPPED(source) ? 1 : 0);
    if (is_text) varint(static_cast<std::uint64_t>(PyArray_ITEMSIZE(source)));
    out_.push_back(static_cast<std::uint8_t>(PyArray_NDIM(source)));
    for (int axis = 0; axis < PyArray_NDIM(source); ++axis) varint(static_cast<std::uint64_t>(PyArray_DIM(source, axis)));
    raw(PyArray_DATA(source), static_cast<std::size_t>(PyArray_NBYTES(source)));
    return Outcome::DONE;
}

Outcome Writer::dict(PyObject* dict, int depth) {
    tag(Tag::DICT);
    const std::size_t at = open_count();
    std::size_t count = 0;
    Py_ssize_t position = 0;
    PyObject* name = nullptr;
    PyObject* item = nullptr;
    while (PyDict_Next(dict, &position, &name, &item)) {
        const PyRef held_name = share(name);
        const PyRef held_item = share(item);
        Outcome outcome = key(name, depth + 1);
        if (outcome == Outcome::DONE) outcome = value(item, depth + 1);
        if (outcome != Outcome::DONE) return outcome == Outcome::FAILED ? failed_under(name) : outcome;
        ++count;
    }
    close_count(at, count);
    return Outcome::DONE;
}

template <bool IS_LIST>
Outcome Writer::sequence(PyObject* sequence, int depth) {
    tag(IS_LIST ? Tag::LIST : Tag::TUPLE);
    const std::size_t at = open_count();
    Py_ssize_t count = 0;
    for (; count < Py_SIZE(sequence); ++count) {
        const PyRef item = share(IS_LIST ? PyList_GET_ITEM(sequence, count) : PyTuple_GET_ITEM(sequence, count));
        const Outcome outcome = value(item.get(), depth + 1);
        if (outcome == Outcome::FAILED) name_place(std::to_string(count));
        if (outcome != Outcome::DONE) return outcome;
    }
    close_count(at, static_cast<std::size_t>(count));
    return Outcome::DONE;
}

Outcome Writer::value(PyObject* obj, int depth) {
    if (++num_nodes_ > CODEC_MAX_NODES || depth > CODEC_MAX_DEPTH) return Outcome::TOO_COMPLEX;
    const PyTypeObject* type = Py_TYPE(obj);
    if (obj == Py_None || type == &PyBool_Type) {
        tag(obj == Py_None ? Tag::NONE : obj == Py_True ? Tag::TRUE : Tag::FALSE);
        return Outcome::DONE;
    }
    if (type == &PyFloat_Type) {
        fixed(Tag::FLOAT, PyFloat_AS_DOUBLE(obj));
        return Outcome::DONE;
    }
    if (type == &PyLong_Type) return integer(obj);
    if (type == &PyUnicode_Type) return text(Tag::STR, obj);
    if (type == &PyArray_Type) return array(reinterpret_cast<PyArrayObject*>(obj));
    if (type == &PyDict_Type) return dict(obj, depth);
    if (type == &PyTuple_Type) return sequence<false>(obj, depth);
    if (type == &PyList_Type) return sequence<true>(obj, depth);
    if (const ScalarKind* kind = scalar_kind_of_type(type)) return scalar(*kind, obj);
    if (type == &PyBytes_Type) {
        blob(Tag::BYTES, PyBytes_AS_STRING(obj), static_cast<std::size_t>(PyBytes_GET_SIZE(obj)));
        return Outcome::DONE;
    }
    if (type == &PyComplex_Type) {
        fixed(Tag::COMPLEX, std::array<double, 2>{PyComplex_RealAsDouble(obj), PyComplex_ImagAsDouble(obj)});
        return Outcome::DONE;
    }
    return pickle(obj);
}

}  // namespace

Encoder::Encoder(PyObject* pickler) : pickler_(pickler == Py_None ? nullptr : Py_XNewRef(pickler)) {}

Encoder::~Encoder() { Py_XDECREF(pickler_); }

Encoder::Encoder(Encoder&& other) noexcept : pickler_(std::exchange(other.pickler_, nullptr)) {}

bool Encoder::encode(PyObject* obj, std::vector<std::uint8_t>& out, EncodeContext context) {
    const std::size_t before = out.size();
    has_pickled_ = false;
    Outcome outcome = Outcome::FAILED;
    try {
        Writer writer(pickler_, out, context.objects);
        outcome = writer.value(obj, 0);
        if (outcome == Outcome::TOO_COMPLEX) {
            out.resize(before);
            outcome = writer.pickle(obj);
        }
        has_pickled_ = writer.has_pickled();
        if (outcome == Outcome::FAILED && context.name != nullptr) name_failure(context.name + writer.failed_at());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
        outcome = Outcome::FAILED;
    }
    if (outcome != Outcome::DONE) out.resize(before);
    return outcome == Outcome::DONE;
}

}  // namespace stepmill
