// Enums that several kernels share. Twin: types.py.
#ifndef ANYBIT_TYPES_CUH
#define ANYBIT_TYPES_CUH

// value = scale * (code - zero) with codes in [0, 2^bits): only the zero differs. min: scale * code + minimum. e4m3 codes are
// 8-bit floats; e2m1, nf4 and iq4 ones stand for the values of a table.
enum class Code { sym, asym, bipolar, e4m3, min, e2m1, nf4, iq4 };
// The type that the tensor cores multiply.
enum class Operand { f16, bf16, s8, e4m3 };
// The type of the result; s32 is the exact integer result, before scales.
enum class Output { s32, f16, bf16, f32 };

#endif  // ANYBIT_TYPES_CUH
