//! The `cu*` symbols that cust's bindings declare, defined here so that nothing
//! links libcuda.
//!
//! Each symbol is a naked function that jumps through its slot of [`TABLE`]; every
//! register and stack argument passes untouched, whatever the signature. A slot
//! starts at [`lazy`], which looks the symbol up on the first call, stores the
//! address in the slot and goes on to the function; so a foreign call (another user
//! of cust in the same program) needs no preparation by this crate.
//!
//! A call that cannot be carried out returns a code instead of crashing:
//!
//! | situation | returned code |
//! |---|---|
//! | no driver library on the machine | `CUDA_ERROR_NO_DEVICE` (100) |
//! | the driver library lacks the symbol | `CUDA_ERROR_NOT_FOUND` (500) |
//!
//! The symbols have default visibility. A process that also links the real libcuda
//! (a shared library of its own that needs it, say) may bind some calls to these
//! definitions and others to the library's: both end in the same libcuda.so.1, which
//! the loader maps once, so handles stay interchangeable. An executable does not
//! export them unless a shared library it links refers to them; a `cdylib` does.

use std::arch::naked_asm;
use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::library;

#[cfg(not(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
compile_error!("feature `cuda` supports Linux on x86-64 and aarch64; build without it elsewhere");

const CUDA_ERROR_NO_DEVICE: u32 = 100;
const CUDA_ERROR_NOT_FOUND: u32 = 500;

type Function = unsafe extern "C" fn();

macro_rules! trampolines {
    ($($name:ident)*) => {
        /// Position of a symbol in the table.
        // The variants are the symbols, spelled as the driver spells them.
        #[allow(non_camel_case_types, clippy::enum_variant_names)]
        enum Slot { $($name,)* Count }

        const COUNT: usize = Slot::Count as usize;

        static NAMES: [&CStr; COUNT] = [$(
            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a symbol name holds a NUL"),
            },
        )*];

        /// Our own definitions, in slot order.
        static TRAMPOLINES: [Function; COUNT] = [$($name,)*];

        $(
            // SAFETY: the name is the driver API's and is defined once in a program;
            // the body passes every argument on untouched (module documentation).
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name() {
                #[cfg(target_arch = "x86_64")]
                naked_asm!(
                    "mov r11d, {slot}",
                    "mov r10, qword ptr [rip + {table}@GOTPCREL]",
                    "jmp qword ptr [r10 + 8 * {slot}]",
                    slot = const Slot::$name as usize,
                    table = sym TABLE,
                );
                #[cfg(target_arch = "aarch64")]
                naked_asm!(
                    "mov w17, #{slot}",
                    "adrp x16, :got:{table}",
                    "ldr x16, [x16, :got_lo12:{table}]",
                    "ldr x16, [x16, #8 * {slot}]",
                    "br x16",
                    slot = const Slot::$name as usize,
                    table = sym TABLE,
                );
            }
        )*
    };
}

/// The addresses that the trampolines jump to.
static TABLE: [AtomicPtr<()>; COUNT] = [const { AtomicPtr::new(lazy as *mut ()) }; COUNT];

/// First call of a symbol: keeps every argument register, asks [`resolve`] for the
/// address, and jumps there. The slot number comes in r11 (x86-64) or x17 (aarch64),
/// which no calling convention uses for arguments.
#[unsafe(naked)]
unsafe extern "C" fn lazy() {
    // On entry rsp is 8 below a multiple of 16; seven pushes and 128 bytes leave it
    // on a multiple of 16, as a call requires.
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "push rax",
        "sub rsp, 128",
        "movups xmmword ptr [rsp], xmm0",
        "movups xmmword ptr [rsp + 16], xmm1",
        "movups xmmword ptr [rsp + 32], xmm2",
        "movups xmmword ptr [rsp + 48], xmm3",
        "movups xmmword ptr [rsp + 64], xmm4",
        "movups xmmword ptr [rsp + 80], xmm5",
        "movups xmmword ptr [rsp + 96], xmm6",
        "movups xmmword ptr [rsp + 112], xmm7",
        "mov edi, r11d",
        "call {resolve}",
        "mov r11, rax",
        "movups xmm0, xmmword ptr [rsp]",
        "movups xmm1, xmmword ptr [rsp + 16]",
        "movups xmm2, xmmword ptr [rsp + 32]",
        "movups xmm3, xmmword ptr [rsp + 48]",
        "movups xmm4, xmmword ptr [rsp + 64]",
        "movups xmm5, xmmword ptr [rsp + 80]",
        "movups xmm6, xmmword ptr [rsp + 96]",
        "movups xmm7, xmmword ptr [rsp + 112]",
        "add rsp, 128",
        "pop rax",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp r11",
        resolve = sym resolve,
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        "stp x29, x30, [sp, #-224]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]",
        "stp x6, x7, [sp, #64]",
        "str x8, [sp, #80]",
        "stp q0, q1, [sp, #96]",
        "stp q2, q3, [sp, #128]",
        "stp q4, q5, [sp, #160]",
        "stp q6, q7, [sp, #192]",
        "mov w0, w17",
        "bl {resolve}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x2, x3, [sp, #32]",
        "ldp x4, x5, [sp, #48]",
        "ldp x6, x7, [sp, #64]",
        "ldr x8, [sp, #80]",
        "ldp q0, q1, [sp, #96]",
        "ldp q2, q3, [sp, #128]",
        "ldp q4, q5, [sp, #160]",
        "ldp q6, q7, [sp, #192]",
        "ldp x29, x30, [sp], #224",
        "br x16",
        resolve = sym resolve,
    );
}

/// Fills the slot and returns the address to go on to.
extern "C" fn resolve(slot: u32) -> *mut () {
    let index = slot as usize;
    let address = match library::open() {
        Err(_) => no_driver as *mut (),
        Ok(library) => match library.address(NAMES[index]) {
            Some(address) if !is_trampoline(address) => address,
            _ => no_symbol as *mut (),
        },
    };
    TABLE[index].store(address, Ordering::Release);
    address
}

/// Whether `address` is one of our own definitions: a library found under libcuda's
/// name that resolves back to them would make a call jump in a circle.
pub(super) fn is_trampoline(address: *mut ()) -> bool {
    TRAMPOLINES.iter().any(|&own| own as *mut () == address)
}

extern "C" fn no_driver() -> u32 {
    CUDA_ERROR_NO_DEVICE
}

extern "C" fn no_symbol() -> u32 {
    CUDA_ERROR_NOT_FOUND
}

// What cust_raw 0.11.3 declares, in alphabetical order.
trampolines! {
    cuArray3DCreate_v2
    cuArray3DGetDescriptor_v2
    cuArrayCreate_v2
    cuArrayDestroy
    cuArrayGetDescriptor_v2
    cuArrayGetPlane
    cuArrayGetSparseProperties
    cuCtxAttach
    cuCtxCreate_v2
    cuCtxCreate_v3
    cuCtxDestroy_v2
    cuCtxDetach
    cuCtxDisablePeerAccess
    cuCtxEnablePeerAccess
    cuCtxGetApiVersion
    cuCtxGetCacheConfig
    cuCtxGetCurrent
    cuCtxGetDevice
    cuCtxGetExecAffinity
    cuCtxGetFlags
    cuCtxGetLimit
    cuCtxGetSharedMemConfig
    cuCtxGetStreamPriorityRange
    cuCtxPopCurrent_v2
    cuCtxPushCurrent_v2
    cuCtxResetPersistingL2Cache
    cuCtxSetCacheConfig
    cuCtxSetCurrent
    cuCtxSetLimit
    cuCtxSetSharedMemConfig
    cuCtxSynchronize
    cuDestroyExternalMemory
    cuDestroyExternalSemaphore
    cuDeviceCanAccessPeer
    cuDeviceComputeCapability
    cuDeviceGet
    cuDeviceGetAttribute
    cuDeviceGetByPCIBusId
    cuDeviceGetCount
    cuDeviceGetDefaultMemPool
    cuDeviceGetExecAffinitySupport
    cuDeviceGetGraphMemAttribute
    cuDeviceGetLuid
    cuDeviceGetMemPool
    cuDeviceGetName
    cuDeviceGetNvSciSyncAttributes
    cuDeviceGetP2PAttribute
    cuDeviceGetPCIBusId
    cuDeviceGetProperties
    cuDeviceGetTexture1DLinearMaxWidth
    cuDeviceGetUuid
    cuDeviceGetUuid_v2
    cuDeviceGraphMemTrim
    cuDevicePrimaryCtxGetState
    cuDevicePrimaryCtxRelease_v2
    cuDevicePrimaryCtxReset_v2
    cuDevicePrimaryCtxRetain
    cuDevicePrimaryCtxSetFlags_v2
    cuDeviceSetGraphMemAttribute
    cuDeviceSetMemPool
    cuDeviceTotalMem_v2
    cuDriverGetVersion
    cuEventCreate
    cuEventDestroy_v2
    cuEventElapsedTime
    cuEventQuery
    cuEventRecord
    cuEventRecordWithFlags
    cuEventSynchronize
    cuExternalMemoryGetMappedBuffer
    cuExternalMemoryGetMappedMipmappedArray
    cuFlushGPUDirectRDMAWrites
    cuFuncGetAttribute
    cuFuncGetModule
    cuFuncSetAttribute
    cuFuncSetBlockShape
    cuFuncSetCacheConfig
    cuFuncSetSharedMemConfig
    cuFuncSetSharedSize
    cuGetErrorName
    cuGetErrorString
    cuGetExportTable
    cuGetProcAddress
    cuGraphAddChildGraphNode
    cuGraphAddDependencies
    cuGraphAddEmptyNode
    cuGraphAddEventRecordNode
    cuGraphAddEventWaitNode
    cuGraphAddExternalSemaphoresSignalNode
    cuGraphAddExternalSemaphoresWaitNode
    cuGraphAddHostNode
    cuGraphAddKernelNode
    cuGraphAddMemAllocNode
    cuGraphAddMemFreeNode
    cuGraphAddMemcpyNode
    cuGraphAddMemsetNode
    cuGraphChildGraphNodeGetGraph
    cuGraphClone
    cuGraphCreate
    cuGraphDebugDotPrint
    cuGraphDestroy
    cuGraphDestroyNode
    cuGraphEventRecordNodeGetEvent
    cuGraphEventRecordNodeSetEvent
    cuGraphEventWaitNodeGetEvent
    cuGraphEventWaitNodeSetEvent
    cuGraphExecChildGraphNodeSetParams
    cuGraphExecDestroy
    cuGraphExecEventRecordNodeSetEvent
    cuGraphExecEventWaitNodeSetEvent
    cuGraphExecExternalSemaphoresSignalNodeSetParams
    cuGraphExecExternalSemaphoresWaitNodeSetParams
    cuGraphExecHostNodeSetParams
    cuGraphExecKernelNodeSetParams
    cuGraphExecMemcpyNodeSetParams
    cuGraphExecMemsetNodeSetParams
    cuGraphExecUpdate
    cuGraphExternalSemaphoresSignalNodeGetParams
    cuGraphExternalSemaphoresSignalNodeSetParams
    cuGraphExternalSemaphoresWaitNodeGetParams
    cuGraphExternalSemaphoresWaitNodeSetParams
    cuGraphGetEdges
    cuGraphGetNodes
    cuGraphGetRootNodes
    cuGraphHostNodeGetParams
    cuGraphHostNodeSetParams
    cuGraphInstantiateWithFlags
    cuGraphInstantiate_v2
    cuGraphKernelNodeCopyAttributes
    cuGraphKernelNodeGetAttribute
    cuGraphKernelNodeGetParams
    cuGraphKernelNodeSetAttribute
    cuGraphKernelNodeSetParams
    cuGraphLaunch
    cuGraphMemAllocNodeGetParams
    cuGraphMemFreeNodeGetParams
    cuGraphMemcpyNodeGetParams
    cuGraphMemcpyNodeSetParams
    cuGraphMemsetNodeGetParams
    cuGraphMemsetNodeSetParams
    cuGraphNodeFindInClone
    cuGraphNodeGetDependencies
    cuGraphNodeGetDependentNodes
    cuGraphNodeGetType
    cuGraphReleaseUserObject
    cuGraphRemoveDependencies
    cuGraphRetainUserObject
    cuGraphUpload
    cuGraphicsMapResources
    cuGraphicsResourceGetMappedMipmappedArray
    cuGraphicsResourceGetMappedPointer_v2
    cuGraphicsResourceSetMapFlags_v2
    cuGraphicsSubResourceGetMappedArray
    cuGraphicsUnmapResources
    cuGraphicsUnregisterResource
    cuImportExternalMemory
    cuImportExternalSemaphore
    cuInit
    cuIpcCloseMemHandle
    cuIpcGetEventHandle
    cuIpcGetMemHandle
    cuIpcOpenEventHandle
    cuIpcOpenMemHandle_v2
    cuLaunch
    cuLaunchCooperativeKernel
    cuLaunchCooperativeKernelMultiDevice
    cuLaunchGrid
    cuLaunchGridAsync
    cuLaunchHostFunc
    cuLaunchKernel
    cuLinkAddData_v2
    cuLinkAddFile_v2
    cuLinkComplete
    cuLinkCreate_v2
    cuLinkDestroy
    cuMemAddressFree
    cuMemAddressReserve
    cuMemAdvise
    cuMemAllocAsync
    cuMemAllocFromPoolAsync
    cuMemAllocHost_v2
    cuMemAllocManaged
    cuMemAllocPitch_v2
    cuMemAlloc_v2
    cuMemCreate
    cuMemExportToShareableHandle
    cuMemFreeAsync
    cuMemFreeHost
    cuMemFree_v2
    cuMemGetAccess
    cuMemGetAddressRange_v2
    cuMemGetAllocationGranularity
    cuMemGetAllocationPropertiesFromHandle
    cuMemGetInfo_v2
    cuMemHostAlloc
    cuMemHostGetDevicePointer_v2
    cuMemHostGetFlags
    cuMemHostRegister_v2
    cuMemHostUnregister
    cuMemImportFromShareableHandle
    cuMemMap
    cuMemMapArrayAsync
    cuMemPoolCreate
    cuMemPoolDestroy
    cuMemPoolExportPointer
    cuMemPoolExportToShareableHandle
    cuMemPoolGetAccess
    cuMemPoolGetAttribute
    cuMemPoolImportFromShareableHandle
    cuMemPoolImportPointer
    cuMemPoolSetAccess
    cuMemPoolSetAttribute
    cuMemPoolTrimTo
    cuMemPrefetchAsync
    cuMemRangeGetAttribute
    cuMemRangeGetAttributes
    cuMemRelease
    cuMemRetainAllocationHandle
    cuMemSetAccess
    cuMemUnmap
    cuMemcpy
    cuMemcpy2DAsync_v2
    cuMemcpy2DUnaligned_v2
    cuMemcpy2D_v2
    cuMemcpy3DAsync_v2
    cuMemcpy3DPeer
    cuMemcpy3DPeerAsync
    cuMemcpy3D_v2
    cuMemcpyAsync
    cuMemcpyAtoA_v2
    cuMemcpyAtoD_v2
    cuMemcpyAtoHAsync_v2
    cuMemcpyAtoH_v2
    cuMemcpyDtoA_v2
    cuMemcpyDtoDAsync_v2
    cuMemcpyDtoD_v2
    cuMemcpyDtoHAsync_v2
    cuMemcpyDtoH_v2
    cuMemcpyHtoAAsync_v2
    cuMemcpyHtoA_v2
    cuMemcpyHtoDAsync_v2
    cuMemcpyHtoD_v2
    cuMemcpyPeer
    cuMemcpyPeerAsync
    cuMemsetD16Async
    cuMemsetD16_v2
    cuMemsetD2D16Async
    cuMemsetD2D16_v2
    cuMemsetD2D32Async
    cuMemsetD2D32_v2
    cuMemsetD2D8Async
    cuMemsetD2D8_v2
    cuMemsetD32Async
    cuMemsetD32_v2
    cuMemsetD8Async
    cuMemsetD8_v2
    cuMipmappedArrayCreate
    cuMipmappedArrayDestroy
    cuMipmappedArrayGetLevel
    cuMipmappedArrayGetSparseProperties
    cuModuleGetFunction
    cuModuleGetGlobal_v2
    cuModuleGetSurfRef
    cuModuleGetTexRef
    cuModuleLoad
    cuModuleLoadData
    cuModuleLoadDataEx
    cuModuleLoadFatBinary
    cuModuleUnload
    cuOccupancyAvailableDynamicSMemPerBlock
    cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
    cuOccupancyMaxPotentialBlockSize
    cuOccupancyMaxPotentialBlockSizeWithFlags
    cuParamSetSize
    cuParamSetTexRef
    cuParamSetf
    cuParamSeti
    cuParamSetv
    cuPointerGetAttribute
    cuPointerGetAttributes
    cuPointerSetAttribute
    cuProfilerInitialize
    cuProfilerStart
    cuProfilerStop
    cuSignalExternalSemaphoresAsync
    cuStreamAddCallback
    cuStreamAttachMemAsync
    cuStreamBatchMemOp
    cuStreamBeginCapture_v2
    cuStreamCopyAttributes
    cuStreamCreate
    cuStreamCreateWithPriority
    cuStreamDestroy_v2
    cuStreamEndCapture
    cuStreamGetAttribute
    cuStreamGetCaptureInfo
    cuStreamGetCaptureInfo_v2
    cuStreamGetCtx
    cuStreamGetFlags
    cuStreamGetPriority
    cuStreamIsCapturing
    cuStreamQuery
    cuStreamSetAttribute
    cuStreamSynchronize
    cuStreamUpdateCaptureDependencies
    cuStreamWaitEvent
    cuStreamWaitValue32
    cuStreamWaitValue64
    cuStreamWriteValue32
    cuStreamWriteValue64
    cuSurfObjectCreate
    cuSurfObjectDestroy
    cuSurfObjectGetResourceDesc
    cuSurfRefGetArray
    cuSurfRefSetArray
    cuTexObjectCreate
    cuTexObjectDestroy
    cuTexObjectGetResourceDesc
    cuTexObjectGetResourceViewDesc
    cuTexObjectGetTextureDesc
    cuTexRefCreate
    cuTexRefDestroy
    cuTexRefGetAddressMode
    cuTexRefGetAddress_v2
    cuTexRefGetArray
    cuTexRefGetBorderColor
    cuTexRefGetFilterMode
    cuTexRefGetFlags
    cuTexRefGetFormat
    cuTexRefGetMaxAnisotropy
    cuTexRefGetMipmapFilterMode
    cuTexRefGetMipmapLevelBias
    cuTexRefGetMipmapLevelClamp
    cuTexRefGetMipmappedArray
    cuTexRefSetAddress2D_v3
    cuTexRefSetAddressMode
    cuTexRefSetAddress_v2
    cuTexRefSetArray
    cuTexRefSetBorderColor
    cuTexRefSetFilterMode
    cuTexRefSetFlags
    cuTexRefSetFormat
    cuTexRefSetMaxAnisotropy
    cuTexRefSetMipmapFilterMode
    cuTexRefSetMipmapLevelBias
    cuTexRefSetMipmapLevelClamp
    cuTexRefSetMipmappedArray
    cuThreadExchangeStreamCaptureMode
    cuUserObjectCreate
    cuUserObjectRelease
    cuUserObjectRetain
    cuWaitExternalSemaphoresAsync
}
