// Enums shared by kernels. Twin: types.py.
#ifndef ANYBIT_TYPES_CUH
#define ANYBIT_TYPES_CUH

// value = scale * (code - zero) with codes in [0, 2^bits): only the zero differs. min: scale * code + minimum. e4m3 codes are
// 8-bit floats; e2m1, nf4 and iq4 codes index a table of values.
enum class Code { sym, asym, bipolar, e4m3, min, e2m1, nf4, iq4 };
// MMA operand type.
enum class Operand { f16, bf16, s8, e4m3 };
// Output type; s32 is the exact integer result before scales.
enum class Output { s32, f16, bf16, f32 };
// What joins gate and up.
enum class Gate { silu, gelu_tanh, swigluoai };

#endif  // ANYBIT_TYPES_CUH
