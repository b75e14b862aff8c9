// The Python module hvd_dyncomp.kernels._native: addresses and sizes in, nothing out. native.py has checked them.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <string.h>

#include "kernels.h"

namespace hvd_dyncomp {
namespace {

#if defined(__x86_64__)
const Variant* const kVariants[] = {&kAvx512, &kAvx2, &kBaseline};  // the fastest first
#else
const Variant* const kVariants[] = {&kBaseline};
#endif

const Variant* in_use = nullptr;

// Working memory of one call: on the stack for usual blocks.
class Scratch {
  public:
    explicit Scratch(size_t block_size) {
        const size_t bytes = scratch_bytes(block_size) + kAlignment;
        if (bytes > sizeof small_) allocated_ = PyMem_Malloc(bytes);
        const uintptr_t at = bytes > sizeof small_ ? (uintptr_t)allocated_ : (uintptr_t)small_;
        memory_ = at ? (void*)((at + kAlignment - 1) / kAlignment * kAlignment) : nullptr;
    }
    ~Scratch() { PyMem_Free(allocated_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    void* get() const { return memory_; }

  private:
    static constexpr size_t kAlignment = 64;
    char small_[10 * 1024];
    void* allocated_ = nullptr;
    void* memory_;
};

// An array as long as a tuple divided by `Stride`: on the stack when it is short.
template <typename Item, int Stride>
class Array {
  public:
    explicit Array(PyObject* tuple) {
        const Py_ssize_t size = PyTuple_Size(tuple);
        if (size < 0) return;
        if (size / Stride > kFew) items_ = (Item*)PyMem_Malloc(size / Stride * sizeof(Item));
        if (items_) count_ = size / Stride;
        else PyErr_NoMemory();
    }
    ~Array() {
        if (items_ != few_) PyMem_Free(items_);
    }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    Item& operator[](size_t i) { return items_[i]; }
    const Item* get() const { return items_; }
    size_t size() const { return count_; }

  private:
    static constexpr Py_ssize_t kFew = 16;
    Item few_[kFew];
    Item* items_ = few_;
    size_t count_ = 0;
};

// A tuple of addresses.
class Payloads {
  public:
    explicit Payloads(PyObject* addresses) : items_(addresses) {
        for (size_t i = 0; i < items_.size(); ++i)
            items_[i] = (const uint8_t*)PyLong_AsVoidPtr(PyTuple_GetItem(addresses, i));
    }
    Versions with(float factor) const { return {items_.get(), items_.size(), factor}; }

  private:
    Array<const uint8_t*, 1> items_;
};

// A tuple of address, number of values, address, number of values and so on.
class Pieces {
  public:
    explicit Pieces(PyObject* pairs) : items_(pairs) {
        for (size_t i = 0; i < items_.size(); ++i)
            items_[i] = {(float*)PyLong_AsVoidPtr(PyTuple_GetItem(pairs, 2 * i)),
                         PyLong_AsSize_t(PyTuple_GetItem(pairs, 2 * i + 1))};
    }
    Values from(size_t first) const { return {items_.get(), items_.size(), first}; }

  private:
    Array<Piece, 2> items_;
};

Shape shape_of(PyObject* blocks, PyObject* block_size, PyObject* level) {
    return {PyLong_AsSize_t(blocks), PyLong_AsSize_t(block_size), (int)PyLong_AsLong(level)};
}

Residual residual_of(PyObject* address, PyObject* dither) {
    return {(uint16_t*)PyLong_AsVoidPtr(address), (uint32_t)PyLong_AsUnsignedLongLongMask(dither)};
}

bool has_arguments(Py_ssize_t count, Py_ssize_t expected) {
    if (count == expected) return true;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
    return false;
}

// encode(out, values, first, residual, dither, blocks, block_size, level)
PyObject* py_encode(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!has_arguments(count, 8)) return nullptr;
    uint8_t* out = (uint8_t*)PyLong_AsVoidPtr(args[0]);
    const Pieces pieces(args[1]);
    const size_t first = PyLong_AsSize_t(args[2]);
    const Residual residual = residual_of(args[3], args[4]);
    const Shape shape = shape_of(args[5], args[6], args[7]);
    if (PyErr_Occurred()) return nullptr;
    const Scratch scratch(shape.block_size);
    if (!scratch.get()) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    in_use->encode(out, pieces.from(first), residual, shape, scratch.get());
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

// decode(values, first, versions, blocks, block_size, level, factor)
PyObject* py_decode(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!has_arguments(count, 7)) return nullptr;
    const Pieces pieces(args[0]);
    const size_t first = PyLong_AsSize_t(args[1]);
    const Payloads payloads(args[2]);
    const Shape shape = shape_of(args[3], args[4], args[5]);
    const float factor = (float)PyFloat_AsDouble(args[6]);
    if (PyErr_Occurred()) return nullptr;
    const Scratch scratch(shape.block_size);
    if (!scratch.get()) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    in_use->decode(pieces.from(first), payloads.with(factor), shape, scratch.get());
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

// reduce(out, versions, residual, dither, real, blocks, block_size, level)
PyObject* py_reduce(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!has_arguments(count, 8)) return nullptr;
    uint8_t* out = (uint8_t*)PyLong_AsVoidPtr(args[0]);
    const Payloads payloads(args[1]);
    const Residual residual = residual_of(args[2], args[3]);
    const size_t real = PyLong_AsSize_t(args[4]);
    const Shape shape = shape_of(args[5], args[6], args[7]);
    if (PyErr_Occurred()) return nullptr;
    const Scratch scratch(shape.block_size);
    if (!scratch.get()) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    in_use->reduce(out, payloads.with(1.0f), residual, real, shape, scratch.get());
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

// variants(): names of those that this processor can run, the fastest first
PyObject* py_variants(PyObject*, PyObject*) {
    PyObject* names = PyList_New(0);
    for (const Variant* variant : kVariants) {
        if (!names || !variant->supported()) continue;
        PyObject* name = PyUnicode_FromString(variant->name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

// use(name) -> the name of the variant that was in use
PyObject* py_use(PyObject*, PyObject* argument) {
    const char* name = PyUnicode_AsUTF8AndSize(argument, nullptr);
    if (!name) return nullptr;
    for (const Variant* variant : kVariants) {
        if (strcmp(variant->name, name) != 0 || !variant->supported()) continue;
        const Variant* before = in_use;
        in_use = variant;
        return PyUnicode_FromString(before->name);
    }
    return PyErr_Format(PyExc_ValueError, "this processor has no variant '%s'", name);
}

PyMethodDef methods[] = {
    {"encode", (PyCFunction)(void (*)(void))py_encode, METH_FASTCALL, nullptr},
    {"decode", (PyCFunction)(void (*)(void))py_decode, METH_FASTCALL, nullptr},
    {"reduce", (PyCFunction)(void (*)(void))py_reduce, METH_FASTCALL, nullptr},
    {"variants", py_variants, METH_NOARGS, nullptr},
    {"use", py_use, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace hvd_dyncomp

PyMODINIT_FUNC PyInit__native() {
    using namespace hvd_dyncomp;
    for (const Variant* variant : kVariants) {
        if (in_use) break;
        if (variant->supported()) in_use = variant;
    }
    return PyModule_Create(&definition);
}
